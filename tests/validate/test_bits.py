"""Recorded bits: `npusim validate FILE.npz`, of matrix units and of whole kernels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from npusim.cli.app import app
from npusim.errors import SpecError, TensorError
from npusim.studies.validate.kernels import check_bits

GOLDEN = Path(__file__).parents[1] / "golden"
KERNELS, VECTORS = GOLDEN / "attention_h200_cut.npz", GOLDEN / "mma_h200_cut.npz"


def flipped(path: Path, tmp_path: Path, **changes: Any) -> Path:
    with np.load(path) as archive:
        arrays = {**archive, **changes}
    np.savez(tmp_path / "flipped.npz", **{key: value for key, value in arrays.items() if value is not None})
    return tmp_path / "flipped.npz"


@pytest.mark.parametrize(
    ("path", "kind", "only", "total"),
    [(VECTORS, "vectors", "hopper.mma.k8.tf32.f32@H200", 1024), (KERNELS, "kernels", "flash/*", 64 * 128)],
)
def test_recordings_are_held_on_the_command_line(path: Path, kind: str, only: str, total: int) -> None:
    done = CliRunner().invoke(app, ["validate", str(path), "--only", only, "--json"])
    assert done.exit_code == 0, done.output
    counts = json.loads(done.stdout)
    assert counts.keys() == {"schema_version", kind}
    assert [(c["matched"], c["total"]) for c in counts[kind].values()] == [(total, total)]
    text = CliRunner().invoke(app, ["validate", str(path), "--only", only]).stdout
    assert f"{total:,} of {total:,} outputs equal" in text
    assert "by --only" in text


def test_a_bit_that_differs_is_shown_and_fails(tmp_path: Path) -> None:
    name = "hopper.mma.k8.tf32.f32@H200"
    with np.load(VECTORS) as archive:
        wrong = archive[f"{name}/D"].copy()
    wrong.flat[5] ^= 1
    file = flipped(VECTORS, tmp_path, **{f"{name}/D": wrong})
    done = CliRunner().invoke(app, ["validate", str(file), "--only", name])
    assert done.exit_code == 1
    assert "case 0" in done.stdout
    assert "1,023 of 1,024 outputs equal" in done.stdout


def test_options_of_timings_are_refused() -> None:
    done = CliRunner().invoke(app, ["validate", str(VECTORS), "--band", "0.1", "-j", "2"])
    assert done.exit_code == 2
    assert "--band, --jobs: these options are for timings" in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"flash/normal_d128/inputs": None}, "no 'flash/normal_d128/inputs'"),
        ({"inputs/flash_normal_d128/v": None}, "not a file of recorded kernels: no 'inputs/"),
        ({"flash/normal_d128/o": np.zeros((1, 64, 64), np.uint16)}, r"o has shape \(1, 64, 64\) in uint16"),
        ({"flash/normal_d128/o": np.zeros(3, np.uint16)}, "not a file of recorded kernels"),
        ({"linear/a/o": np.zeros(3, np.uint16)}, "linear/a: unknown family of kernels; allowed: pasa, flash, fp8"),
    ],
)
def test_files_of_another_form_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(TensorError, match=message):
        check_bits(flipped(KERNELS, tmp_path, **change), "[fl]*")


def test_the_device_of_a_kernel_may_be_named(tmp_path: Path) -> None:
    file = flipped(KERNELS, tmp_path, **{"flash/normal_d128/device": np.array("a100")})
    (report,) = check_bits(file, "flash/*").reports.values()
    assert 0 < report.matched < report.total  # another arithmetic of its matrix units
    with pytest.raises(SpecError, match="no device named 'h900'"):
        check_bits(flipped(KERNELS, tmp_path, **{"flash/normal_d128/device": np.array("h900")}), "flash/*")
    with pytest.raises(SpecError, match="--only 'x' selects nothing"):
        check_bits(KERNELS, "x")
