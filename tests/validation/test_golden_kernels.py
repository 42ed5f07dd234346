"""Whole attention kernels of an H200, bit for bit (golden/README.md in ../shared)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from npusim.errors import SpecError, TensorError, TilingError
from npusim.run import run
from npusim.validate import BitsReport, validate

CUT = Path(__file__).parent.parent / "golden" / "attention_h200_cut.npz"


def bits(path: Path, only: str | None = None) -> BitsReport:
    report = validate(path, only=only)
    assert isinstance(report, BitsReport)
    return report


def test_cut_kernels_shipped_with_the_tests_are_equal_bit_for_bit() -> None:
    report = bits(CUT)
    # One head, 64 rows of each of four kernels; PASA's 512 shifted keys and 4 blocks of state.
    assert report.total == 2 * 64 * 128 + 2 * 64 * 64 + 512 * 128 + 4 * 16 * 8
    assert report.matched == report.total


def test_every_output_of_every_kernel_is_equal(shared_folder: Path) -> None:
    report = bits(shared_folder / "golden" / "attention_h200.npz")
    outputs = [r.total for name, r in report.kernels.items() if ":" not in name]
    assert sum(outputs) == 1_703_936
    assert report.matched == report.total


def test_one_flipped_bit_is_found_and_shown(tmp_path: Path) -> None:
    with np.load(CUT) as archive:
        arrays = dict(archive)
    arrays["flash/normal_d128/o"] = arrays["flash/normal_d128/o"].copy()
    arrays["flash/normal_d128/o"][0, 7, 3] ^= 1
    np.savez(tmp_path / "flipped.npz", **arrays)
    report = bits(tmp_path / "flipped.npz", only="flash/*")
    assert report.total - report.matched == 1
    assert not report.is_passed
    assert "(0, 7, 3)" in str(report.kernels["flash/normal_d128"].first_mismatch)


def test_only_counts_what_it_leaves_out() -> None:
    report = bits(CUT, only="fp8/*")
    assert set(report.kernels) == {"fp8/sink7_s256_rev_chain", "fp8/sink7_s1_fwd_fresh"}
    assert report.left_out == 2


def test_only_that_selects_nothing_is_an_error() -> None:
    with pytest.raises(SpecError, match="--only 'nothing' selects no kernel"):
        bits(CUT, only="nothing")


def test_truncated_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cut.npz").write_bytes(CUT.read_bytes()[:1000])
    with pytest.raises(TensorError, match=r"cut\.npz: not a readable npz, or truncated"):
        bits(tmp_path / "cut.npz")


def test_chained_product_is_refused_on_the_910b2_with_the_reason() -> None:
    with pytest.raises(TilingError, match="no route of ascend_910b2 leads from UB to L0C"):
        run("flash", seq=256, precision="accumulate=chained", numerics=False)
