"""Random kernels: on every device refused with a reason, or every bit is what the kernel's own lines compute."""

from __future__ import annotations

import math
from collections import Counter
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from npusim import kernel as words
from npusim.config.load import load_device
from npusim.config.tiling import build_tiling
from npusim.errors import FlagError, ProgramError, SpecError, TilingError
from npusim.program.ir.check import check
from npusim.program.numerics.executor import execute
from npusim.program.numerics.input_tensors import recipe_source
from tests.algorithms.drawn import Drawn
from tests.algorithms.interpreter import Machine, Run

if TYPE_CHECKING:
    from pathlib import Path

device_of = cache(load_device)
MACHINES: list[tuple[str, dict[str, Any]]] = [
    ("ascend_910b2", {"depth": 0}), ("ascend_910b2", {"depth": 2}), ("ascend_950", {"layout": "dn"}), ("h200", {}),
    ("a10", {}), ("t4", {}), ("v100", {}),
]  # fmt: skip


def outcomes(drawn: Drawn, folder: Path) -> list[str]:
    """Return for each of the machines "same", where bits differ, or the reason of a refusal."""
    path, found = folder / f"drawn_{drawn.number}.py", {**vars(words), "inf": math.inf}
    path.write_text(drawn.source, encoding="utf-8")
    exec(compile(drawn.source, str(path), "exec"), found)
    by_family = {s.family: s for s in words.attention("drawn", found["drawn"], precisions=[drawn.p])}
    return [outcome(drawn, by_family[device_of(hw).family], hw, fields) for hw, fields in MACHINES]


def outcome(drawn: Drawn, schedule: Any, hw: str, fields: dict[str, Any]) -> str:
    device, problem = device_of(hw), drawn.problem
    # Warps and lanes want more rows than a tiny problem has; V100 chooses its own.
    blocks = {} if hw == "v100" else drawn.blocks | ({} if device.family == "ascend" else {"block_q": 64})
    try:
        program = schedule.program(
            problem, build_tiling(schedule.tiling, blocks | fields), device, drawn.p, is_hinted=False
        )
    except (ProgramError, SpecError, TilingError) as refused:
        return str(refused)
    try:
        check(program, device.flags)
    except FlagError as refused:  # more rings than pairs of pipes have flags
        return str(refused)
    inputs, machine = recipe_source(problem), Machine(device)
    written = execute(program, inputs).tensors
    for cell in program.phases[0].blocks:
        there = written.head(program.tensors["o"], cell.batch, cell.head)[cell.row : cell.row + cell.rows]
        here = Run(problem, cell, inputs, machine, drawn.p).out(drawn.source, "drawn", drawn.given())
        bits = np.dtype(f"u{here.itemsize}")
        assert here.shape == there.shape
        if (differ := there.view(bits) != here.view(bits)).any():
            return f"differs: {differ.sum()} of {differ.size} in {cell}"
    return "same"


def check_all(numbers: range, folder: Path) -> Counter[str]:
    """Compare kernels on all machines; return how often each machine ran one."""
    ran: Counter[str] = Counter()
    for drawn in map(Drawn, numbers):
        for (hw, fields), found in zip(MACHINES, outcomes(drawn, folder), strict=True):
            assert not found.startswith("differs"), f"{drawn.number} on {hw} {fields}: {found}\n{drawn.source}"
            ran[hw] += found == "same"
    return ran


def test_bits_of_random_kernels_are_those_of_their_lines(tmp_path: Path) -> None:
    ran = check_all(range(6), tmp_path)
    assert min(ran[hw] for hw, _ in MACHINES) >= 2


@pytest.mark.exhaustive
def test_bits_of_many_random_kernels_are_those_of_their_lines(tmp_path: Path) -> None:
    ran = check_all(range(200), tmp_path)
    assert min(ran[hw] for hw, _ in MACHINES) >= 100


M = "        m = m_new\n"
#: What random kernels found: changes of a plain attention, and on how many machines it runs.
FOUND: dict[str, tuple[tuple[tuple[str, str], ...], int]] = {
    "P summed behind the product": (
        (("        l = l * a + e.sum()\n", ""), (M, f"{M}        l = l * a + w.to(F).sum()\n")), 7,
    ),
    "a factor taken behind it": (
        (("        a = exp(m - m_new)\n", ""), ("        l = l * a + e.sum()\n", ""),
         ("        o = o * a", "        a = exp(m - m_new)\n        l = l * a + e.sum()\n        o = o * a")), 7,
    ),
    "O rescaled before the product": (
        (("o = o * a + pv", "o = o + pv"), ("        pv =", "        o = o * a\n        pv =")), 7,
    ),
    "two products of one operand": (((M, f'{M}        o = maximum(o, (s.to("float16") @ vj).to(F))\n'),), 7),
    "scores read without their mask": (
        (("        s = where(mask, (q", "        z = (q"),
         (" * scale, -inf)", "\n        s = where(mask, z * scale, -inf)"),
         ("l * a + e.sum()", "l * a + e.sum() + z.max()")), 7,
    ),
    "two products of scores": (((M, f"{M}        l = l + (q @ kj.T).to(F).max()\n"),), 7),
    "O kept narrower than it adds up": (
        (("o * a + pv", 'o * a.to("float16") + w @ vj'), ("        pv = (w @ vj).to(F)\n", ""),
         ('"row value", 0.0, F', '"row value", 0.0, "float16"'), ("return o /", "return o.to(F) /")), 4,
    ),
}  # fmt: skip
PLAIN = """\
@kernel(q="row head", k="key head", v="key value", mask="row key")
def drawn(q, k, v, mask, p, scale):
    m, l, o = full("row", -inf, F), full("row", 0.0, F), full("row value", 0.0, F)
    for kj, vj in tiles(k, v):
        s = where(mask, (q @ kj.T).to(F) * scale, -inf)
        m_new = maximum(m, s.max())
        a = exp(m - m_new)
        e = exp(s - m_new)
        w = e.to("float16")
        l = l * a + e.sum()
        pv = (w @ vj).to(F)
        o = o * a + pv
        m = m_new
    return o / l
"""


@pytest.mark.parametrize("what", list(FOUND))
def test_what_random_kernels_found(what: str, tmp_path: Path) -> None:
    changes, machines = FOUND[what]
    drawn = Drawn.plain(PLAIN)
    for old, new in changes:
        assert old in drawn.source
        drawn.source = drawn.source.replace(old, new)
    drawn.source = f'F = "float32"\n{drawn.source}'
    found = outcomes(drawn, tmp_path)
    assert not [x for x in found if x.startswith("differs")]
    assert found.count("same") == machines, found
