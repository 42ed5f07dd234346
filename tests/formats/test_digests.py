"""Bits of every registry entry, cast, function and schedule, as recorded in ``digests.json``.

Bits must not depend on the machine or the Python: a digest that differs on one of them is a bug.
The file was held against x86 processors with and without fused multiply-adds, an emulated Arm, and
Python 3.11, 3.13 and 3.14.  Where bits are meant to change: ``python tests/formats/digests.py``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from . import digests

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def recorded() -> dict[str, str]:
    found: dict[str, str] = json.loads(digests.FILE.read_text())
    return found


@pytest.mark.parametrize("part", digests.PARTS, ids=lambda part: part.__name__)
def test_bits_are_the_recorded_ones(part: Callable[[], Iterator[tuple[str, str]]], recorded: dict[str, str]) -> None:
    found = dict(part())
    assert found
    differing = sorted(name for name in found if recorded.get(name) != found[name])
    assert not differing, "other bits; if they are meant: python tests/formats/digests.py"


def test_the_file_has_no_more_than_there_is(recorded: dict[str, str]) -> None:
    groups = {"matmul", "cast", "sum", "max", "allreduce"}
    # One of each kind is enough to know that a whole part was not left out, or renamed.
    kinds = {name.split(" ")[0].partition(".")[0] for name in recorded}
    assert groups <= kinds
    assert {n.removeprefix("matmul ") for n in recorded if n.startswith("matmul ")} == set(digests.f.ARITHMETICS)


@pytest.mark.exhaustive
@pytest.mark.parametrize("cpu", ["generic", "x86-64-v2", "x86-64-v3"])
def test_other_instruction_sets_give_the_same_bits(cpu: str, tmp_path: Path) -> None:
    """The same kernels compiled for processors without fused multiply-adds or wide vectors.

    Only x86 can be asked for by name; numpy is told to use its own baseline too.
    """
    import platform

    if platform.machine() != "x86_64":
        pytest.skip("names of x86 processors")
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "NPUSIM_CACHE": str(tmp_path),
        "NUMBA_CPU_NAME": cpu,
        "NUMBA_CPU_FEATURES": "",
        "NPY_DISABLE_CPU_FEATURES": "AVX2 FMA3 AVX512F AVX512CD AVX512_SKX",
    }
    code = "import json, digests; print(json.dumps(digests.all_digests()))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=digests.FILE.parent,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == json.loads(digests.FILE.read_text())
