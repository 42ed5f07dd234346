"""A folder of probes, the outputs that come back, and the device file that they become."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest
from typer.testing import CliRunner

import npusim
from npusim.cli.app import app
from npusim.config.load import load_device
from npusim.errors import TensorError
from npusim.formats import cast, exp, get_format, reduce_sum
from npusim.studies.probe import vector
from npusim.studies.probe.decide import Identified, by_registry
from npusim.studies.probe.files import cases_of, encoded, folder_contents, probes_archive, read_outputs
from npusim.studies.probe.overlay import Settled, identify, settled_keys
from npusim.studies.probe.questions import ProbeCase, probes_of

if TYPE_CHECKING:
    from pathlib import Path

    from npusim.formats.cast import Array

MEGABYTE = 1 << 20
UNIT = "unit.f16.f32:(c+0..15):fraction-26:cut-floor"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Probes of float16 with C, for a 910B2, as the verb writes them."""
    path = tmp_path_factory.mktemp("probe")
    for name, content in folder_contents(("f16.f32",), "ascend_910b2").items():
        (path / name).write_bytes(content)
    return path


def test_files_of_a_user_are_not_overwritten(tmp_path: Path) -> None:
    """`probe bits -o .` replaced a README.md and a run_torch.py that were there."""
    asked = ["probe", "bits", "--cases", "f16.f32", "-o", str(tmp_path)]
    own = {"README.md": b"mine", "probes.npz": b"no archive"}
    for name, content in own.items():
        (tmp_path / name).write_bytes(content)
    refused = CliRunner().invoke(app, asked)
    assert refused.exit_code == 2
    assert all(str(tmp_path / name) in refused.stderr for name in own)
    assert {f.name: f.read_bytes() for f in tmp_path.iterdir()} == own
    for name in own:
        (tmp_path / name).unlink()
    assert CliRunner().invoke(app, asked).exit_code == 0
    again = CliRunner().invoke(app, [*asked[:3], "bf16.f32", *asked[4:]])  # its own files, with other probes
    assert again.exit_code == 0, again.stderr
    (tmp_path / "run_torch.py").write_text("edited")
    assert CliRunner().invoke(app, asked).exit_code == 2


def operation(key: str) -> Array:
    """What a vector core returns that computes as a 910B2 is taken to, its casts to nearest away."""
    one, given = vector.cases()[key], vector.inputs()
    x = given[one.inputs[0]]
    if one.operation == "sum":
        return reduce_sum(x, one.fmt, "tree_halves")
    if one.operation == "cast":
        return cast(x, one.out, rounding="nearest_away")
    assert one.operation == "exp"
    return exp(x, one.fmt)


def save(folder: Path, name: str, **more: Array) -> Path:
    """Outputs of a 910B2 whose Cube is another unit than its file has."""
    case = ProbeCase("f16.f32")
    p = probes_of(case)
    keys = (*(k for k in vector.cases() if k.startswith("sum.")), "cast.float16", "exp.float16")
    arrays = {f"{k}/o": (x := operation(k)).view(f"u{x.itemsize}") for k in keys}
    arrays["f16.f32/d"] = encoded(by_registry(name, case, p.a, p.b, p.c, 16), "float32")
    facts = json.dumps({"framework": "a test", "chip": "none", "date": "2026-11-27"})
    np.savez(folder / "outputs.npz", facts=np.array(facts), **{**arrays, **more})
    return folder / "outputs.npz"


def test_outputs_become_a_device_file_whose_runs_print_measured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    file = save(folder, "ascend.cube_rz24.k16.f16.f32")
    done = CliRunner().invoke(app, ["probe", "identify", str(file), "--json"])
    assert done.exit_code == 0, done.output
    read = json.loads(done.stdout)
    assert [p["name"] for p in read["products"]] == ["ascend.cube_rz24.k16.f16.f32"]
    device = load_device(folder / "ascend_910b2_measured.yaml")
    choice = device.arithmetic_choices["cores.aic.engines.CUBE.arithmetic.float16"]
    assert (choice.value, choice.basis) == ("ascend.cube_rz24.k16.f16.f32", "measured")
    assert "82,944 of 82,944 outputs" in choice.source
    assert "a test" in choice.source
    assert device.arithmetic_choices["cores.aic.engines.CUBE.arithmetic.bfloat16"].basis == "assumed"
    assert device.row_sum is not None
    assert (device.row_sum.value, device.row_sum.basis) == ("tree_halves", "measured")
    run = npusim.run("flash", hw=str(folder / "ascend_910b2_measured.yaml"), seq=128, rows="0", heads=[0])
    assert run.numerics is not None
    assert run.numerics.arithmetic == {"ascend.cube_rz24.k16.f16.f32": "measured"}
    assert run.numerics.row_sums == {"tree_halves": "measured"}
    assert not any("assumed" in note for note in run.notes)
    assert not run.spread  # nothing that moves the outputs is assumed any more


def test_a_unit_that_no_kernel_computes_runs_at_once_by_the_parameters_in_its_name(folder: Path) -> None:
    file = folder / "unit.yaml"
    key = "cores.aic.engines.CUBE.arithmetic.float16"
    value = json.dumps({"value": UNIT, "basis": "measured", "source": "a test"})
    file.write_text(f"schema: npusim.device/1\nextends: ascend_910b2\nname: unit\n{key}: {value}\n", encoding="utf-8")
    run = npusim.run("flash", hw=str(file), seq=16, rows="0", heads=[0])
    assert run.numerics is not None
    assert run.numerics.arithmetic == {UNIT: "measured"}
    assert run.numerics.error.rmse < 1e-3


def test_unexplained_outputs_are_no_device_file_and_exit_code_1(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    case, p = ProbeCase("f16.f32"), probes_of(ProbeCase("f16.f32"))
    d = encoded(by_registry("ascend.cube.k16.f16.f32", case, p.a, p.b, p.c, 16), "float32")
    d[5000, 8] ^= 1
    np.savez(folder / "faulty.npz", **{"f16.f32/d": d})
    done = CliRunner().invoke(app, ["probe", "identify", "faulty.npz", "-o", "none.yaml"])
    assert done.exit_code == 1
    assert "1 of 24,624 outputs are unexplained; first: row 5000" in done.output
    assert not (folder / "none.yaml").exists()


def test_an_answer_without_c_that_differs_is_said_and_the_one_with_c_is_taken() -> None:
    def answer(case: str, name: str) -> tuple[Identified, None]:
        asked = ProbeCase(case)
        return Identified(asked, name, None, asked.formats[2], "nearest_even", (), (name,), 9, 9), None

    for other, differs in (("ascend.cube_rz24.k16.f16.f32", True), ("ascend.cube.k16.f16.f32", False)):
        products = {"f16.f32.to_f16": answer("f16.f32.to_f16", other)}
        products["f16.f32"] = answer("f16.f32", "ascend.cube.k16.f16.f32")
        ((_, value, count),) = settled_keys(Settled(products, {}), load_device("ascend_910b2"))
        assert value == "ascend.cube.k16.f16.f32"
        assert (f"f16.f32.to_f16 are explained by another unit: {other}" in count) == differs


def test_a_format_has_less_than_a_megabyte_of_probes() -> None:
    wanted = ("f16.f32", "f16.f32.to_f16", "bf16.f32", "bf16.f32.to_bf16")
    assert cases_of(load_device("ascend_910b2")) == (wanted, ())
    assert "e4m3.f32" in cases_of(load_device("h100"))[0]
    assert "ascend.cube_mx.k64.e4m3.f32" in cases_of(load_device("ascend_950"))[1]
    assert len(probes_archive(("f32.f32",), with_vector=False)) < MEGABYTE  # the largest


@pytest.mark.parametrize(
    ("key", "array", "message"),
    [
        ("f16.f32/d", np.zeros((64, 16), np.uint32), "needs 5184 rows"),
        ("f16.f32/d", np.zeros((5184, 16), np.uint16), "as uint32"),
        ("f16.f32/d", np.zeros((5184, 7), np.uint32), "side of a tile"),
        ("bf16.f32/d", np.zeros((5184, 16), np.uint32), "bf16.f32/d: unknown key;"),
        ("facts", np.array(json.dumps({"probes": "0" * 64})), "outputs of probes other"),
    ],
)
def test_outputs_of_another_form_are_refused(folder: Path, key: str, array: Array, message: str) -> None:
    np.savez(folder / "wrong.npz", **{key: array})
    with pytest.raises(TensorError, match=message):
        read_outputs(folder / "wrong.npz")


@pytest.mark.parametrize("rounding", ["nearest_even", "nearest_away"])
def test_casts_at_midpoints_tell_to_even_from_away(rounding: str) -> None:
    for target in vector.TARGETS:
        key = f"cast.{target}"
        x = vector.inputs()[f"ties.{target}"]
        y = np.ascontiguousarray(cast(x, target, rounding=rounding)).view(get_format(target).bits_dtype)
        found = vector.identify_operation(key, vector.cases()[key], (x,), y)
        assert {a.split(",")[0] for a in found.answers} == {rounding}


def test_orders_of_sums_are_read_off_their_rows() -> None:
    for order, width in (("vector_lanes", "float16"), ("sequential", "float32"), ("lanes_2x4x1", "float32")):
        key = f"sum.{width}@64"
        x = vector.inputs()[f"rows.{width}@64"]
        y = np.ascontiguousarray(reduce_sum(x, width, order)).view(get_format(width).bits_dtype)
        assert order in vector.identify_operation(key, vector.cases()[key], (x,), y).answers
    reverse = np.ascontiguousarray(reduce_sum(x[:, ::-1].copy(), "float32", "sequential")).view(np.uint32)
    unknown = vector.identify_operation(key, vector.cases()[key], (x,), reverse)
    assert not unknown.answers  # no order that npusim has: said as a tree
    assert unknown.note.startswith("(0+(1+(2+(3")


def test_torchs_own_products_are_identified_whole_tiles_among_them(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    for name, content in folder_contents(("f16.f32.to_f16", "f32.f32.to_f32")).items():
        (tmp_path / name).write_bytes(content)
    subprocess.run((sys.executable, "run_torch.py", "cpu"), cwd=tmp_path, check=True)
    settled = identify(read_outputs(tmp_path / "outputs.npz"))
    for one, _ in settled.products.values():
        assert (one.name is not None and one.explained == one.asked) or one.findings
    assert not list(settled_keys(settled, load_device("h100")))
