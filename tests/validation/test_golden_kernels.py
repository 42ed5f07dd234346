"""Whole attention kernels of an H200, bit for bit (golden/README.md in ../shared)."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from npusim.errors import TilingError
from npusim.run import run
from npusim.studies.validate.kernels import check_kernels
from reports.validation import study

CUT = Path(__file__).parent.parent / "golden" / "attention_h200_cut.npz"


def test_cut_kernels_shipped_with_the_tests_are_equal_bit_for_bit() -> None:
    reports = check_kernels(CUT).values()
    # One head, 64 rows of each of four kernels; PASA's 512 shifted keys and 4 blocks of state.
    assert sum(r.total for r in reports) == 2 * 64 * 128 + 2 * 64 * 64 + 512 * 128 + 4 * 16 * 8
    assert all(r.matched == r.total for r in reports)


def test_every_output_of_every_kernel_is_equal(shared_folder: Path) -> None:
    path = shared_folder / "golden" / "attention_h200.npz"
    reports = check_kernels(path)
    assert sum(r.total for name, r in reports.items() if ":" not in name) == 1_703_936
    assert all(r.matched == r.total for r in reports.values())
    assert study.recorded()[path.name].counts == study.counts(reports)
    assert study.recorded()[path.name].sha256 == sha256(path.read_bytes()).hexdigest()[:16]


def test_one_flipped_bit_is_found_and_shown(tmp_path: Path) -> None:
    with np.load(CUT) as archive:
        arrays = dict(archive)
    arrays["flash/normal_d128/o"] = arrays["flash/normal_d128/o"].copy()
    arrays["flash/normal_d128/o"][0, 7, 3] ^= 1
    np.savez(tmp_path / "flipped.npz", **arrays)
    (report,) = check_kernels(tmp_path / "flipped.npz", "flash/*").values()
    assert (report.total - report.matched, report.first_mismatch) == (1, "(0, 7, 3)")


def test_chained_product_is_refused_on_the_910b2_with_the_reason() -> None:
    with pytest.raises(TilingError, match="ascend_910b2 has no route from UB to L0C"):
        run("flash", seq=256, precision="accumulate=chained", numerics=False)
