"""A mechanism of kernels is two edits: a decision, and the place where it acts; no other file carries it there.

The mechanism added here is one that npusim does not have: a tile that is handed over is acknowledged several times.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import npusim

PACKAGE = Path(npusim.__file__).parent


class Mechanism(NamedTuple):
    """Two edits of the package, (file, text, text in its place), a kernel and a call, and the constant behind it."""

    edits: tuple[tuple[str, str, str], tuple[str, str, str]]
    kernel: str
    call: str
    constant: str


MECHANISMS = {
    "ascend_910b2": Mechanism(
        (
            ("machines/decisions.py", "    period: int = 1\n", "    period: int = 1\n    acknowledged: int = 1\n"),
            ("machines/ascend/pricing.py", "spec.value * share", "spec.value * share * decided.acknowledged"),
        ),
        "KERNEL = AscendKernel(name='k', whose='ours', decides=AscendDecisions(together=2{decided}))",
        "'flash', hw='ascend_910b2', workload='llama2_7b', seq=2048",
        "flags.tile_cycles",
    )
}
#: What is printed of two runs: cycles, and the cycles by the constant behind them.
RUN = """
import json, sys, npusim
runs = [
    npusim.run({call}, tiling={{"kernel": f"{{name}}.py:KERNEL"}}, numerics=False, trace_groups=())
    for name in ("plain", "acknowledged")
]
print(npusim.__file__)
print(json.dumps([[r.cycles, r.timing.term_cycles] for r in runs]))
"""


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """Return the folder of a copy of the package."""
    shutil.copytree(PACKAGE, tmp_path / "npusim", ignore=shutil.ignore_patterns("__pycache__"))
    for folder in ("hwconfigs", "workloads"):
        (tmp_path / folder).symlink_to(PACKAGE.parent / folder)
    return tmp_path


@pytest.mark.parametrize("hw", MECHANISMS)
def test_a_tile_that_is_handed_over_is_acknowledged_three_times(hw: str, copied: Path) -> None:
    edits, kernel, call, constant = MECHANISMS[hw]
    for file, old, new in edits:
        text = (copied / "npusim" / file).read_text(encoding="utf-8")
        assert text.count(old) == 1, (file, old)
        (copied / "npusim" / file).write_text(text.replace(old, new), encoding="utf-8")
    for name, decided in {"plain": "", "acknowledged": ", acknowledged=3"}.items():
        text = f"from npusim.kernel import *\n{kernel.format(decided=decided)}\n"
        (copied / f"{name}.py").write_text(text, encoding="utf-8")
    code = [sys.executable, "-c", RUN.format(call=call)]
    env = {**os.environ, "PYTHONPATH": str(copied)}
    done = subprocess.run(code, cwd=copied, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    where, runs = done.stdout.splitlines()
    assert Path(where).parent == copied / "npusim"
    (cycles, terms), (more_cycles, more_terms) = json.loads(runs)
    assert more_cycles > cycles
    differ = {key: more_terms[key] / terms[key] for key in terms if more_terms[key] != terms[key]}
    assert differ == pytest.approx({constant: 3.0})
