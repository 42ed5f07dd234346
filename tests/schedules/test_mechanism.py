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
from npusim import cache

PACKAGE = Path(npusim.__file__).parent
#: What a barrier of a block's warps costs.
BARRIERS = tuple(f"cores.sm.engines.WARPS.sharing.{n}" for n in ("barrier_cycles", "barrier_warp_cycles"))


class Mechanism(NamedTuple):
    """Two edits of the package, (file, text, text in its place), a kernel and a call, and the constants behind it.

    ``growth``: by how much each constant's cycles grow; None: by more than nothing, as others pay it too.
    """

    edits: tuple[tuple[str, str, str], tuple[str, str, str]]
    kernel: str
    call: str
    growth: dict[str, float | None]
    tiling: dict[str, int]


MECHANISMS = {
    "ascend_910b2": Mechanism(
        (
            ("machines/decisions.py", "    period: int = 1\n", "    period: int = 1\n    acknowledged: int = 1\n"),
            ("machines/ascend/ascend_pricing.py", "spec.value * share", "spec.value * share * decided.acknowledged"),
        ),
        "KERNEL = AscendKernel(name='k', whose='ours', decides=AscendDecisions(together=2{decided}))",
        "'flash', hw='ascend_910b2', workload='llama2_7b', seq=2048",
        {"flags.tile_cycles": 3.0},
        {},
    ),
    "h200": Mechanism(
        (
            ("machines/decisions.py", "    from_last: bool", "    acknowledged: int = 1\n    from_last: bool"),
            (
                "machines/sm/group_work.py",
                'copies=copies, pays=("tile",))',
                'copies=copies, pays=("tile",)).meeting(self.decided.acknowledged - 1)',
            ),
        ),
        "KERNEL = GpuKernel(name='k', whose='ours', decides=GpuDecisions(warp_rows=16{decided}))",
        "'flash', hw='h200', workload='llama2_7b', seq=2048",
        dict.fromkeys(BARRIERS),
        {"block_q": 128, "block_kv": 64, "warps": 8, "stages": 3},  # else each run chooses its tile
    ),
}
#: What is printed of two runs: cycles, and the cycles by the constant behind them.
RUN = """
import json, sys, npusim
runs = [
    npusim.run({call}, tiling={{"kernel": f"{{name}}.py:KERNEL", **{tiling}}}, numerics=False, trace_groups=())
    for name in ("plain", "acknowledged")
]
print(npusim.__file__)
print(json.dumps([[r.cycles, r.timing.term_cycles] for r in runs]))
"""


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """Return the folder of a copy of the package, with the machine code that is stored for it.

    Files have their times, so that Python compiles the edited ones alone.
    """

    def results(folder: str, names: list[str]) -> list[str]:
        return [n for n in names if Path(folder).name == "__pycache__" and not n.endswith(".pyc")]

    shutil.copytree(PACKAGE, tmp_path / "npusim", ignore=results)
    (tmp_path / "npusim" / "__pycache__").mkdir(exist_ok=True)
    for file in (cache.folder() or PACKAGE / "__pycache__").glob("*.code"):
        shutil.copy2(file, tmp_path / "npusim" / "__pycache__")
    for folder in ("hwconfigs", "workloads"):
        (tmp_path / folder).symlink_to(PACKAGE.parent / folder)
    return tmp_path


@pytest.mark.parametrize("hw", MECHANISMS)
def test_a_tile_that_is_handed_over_is_acknowledged_three_times(hw: str, copied: Path) -> None:
    edits, kernel, call, growth, tiling = MECHANISMS[hw]
    for file, old, new in edits:
        text = (copied / "npusim" / file).read_text(encoding="utf-8")
        assert text.count(old) == 1, (file, old)
        (copied / "npusim" / file).write_text(text.replace(old, new), encoding="utf-8")
    for name, decided in {"plain": "", "acknowledged": ", acknowledged=3"}.items():
        text = f"from npusim.kernel import *\n{kernel.format(decided=decided)}\n"
        (copied / f"{name}.py").write_text(text, encoding="utf-8")
    code = [sys.executable, "-c", RUN.format(call=call, tiling=tiling)]
    env = {**os.environ, "PYTHONPATH": str(copied), cache.VARIABLE: ""}  # the copy's cache folder
    done = subprocess.run(code, cwd=copied, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    where, runs = done.stdout.splitlines()
    assert Path(where).parent == copied / "npusim"
    (cycles, terms), (more_cycles, more_terms) = json.loads(runs)
    assert more_cycles > cycles
    differ = {key: more_terms[key] / terms[key] for key in terms if more_terms[key] != terms[key]}
    assert differ.keys() == growth.keys()
    assert all(ratio > 1 for ratio in differ.values())
    known = {key: ratio for key, ratio in growth.items() if ratio is not None}
    assert {key: differ[key] for key in known} == pytest.approx(known)
