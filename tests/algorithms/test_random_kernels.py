"""Random kernels: on every device refused with a reason, or every bit is what the kernel's own lines compute."""

from __future__ import annotations

import math
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from npusim import kernel as words
from npusim.config.load import load_device
from npusim.config.tiling import build_tiling
from npusim.errors import FlagError, ProgramError, SpecError, TilingError
from npusim.ir.check import check
from npusim.numerics.executor import execute
from npusim.numerics.inputs import recipe_source
from npusim.simulate import flag_budget
from tests.algorithms.drawn import Drawn, known
from tests.algorithms.interpreter import Machine, Run

device_of = cache(load_device)
MACHINES = [
    ("ascend_910b2", {"depth": 0}), ("ascend_910b2", {"depth": 2}), ("ascend_950", {}), ("h200", {}), ("a10", {}),
    ("t4", {}), ("v100", {}),
]  # fmt: skip


def schedules(drawn: Drawn, path: Path) -> Any:
    path.write_text(drawn.source, encoding="utf-8")
    found = {**vars(words), "inf": math.inf}
    exec(compile(drawn.source, str(path), "exec"), found)
    return {s.family: s for s in words.attention("drawn", found["drawn"], precisions=[drawn.p])}


def outcome(drawn: Drawn, schedule: Any, hw: str, fields: dict[str, Any]) -> str:
    """Return the reason of a refusal, else "same", or where bits differ."""
    device, problem = device_of(hw), drawn.problem
    blocks = drawn.blocks if device.family == "ascend" else {} if hw == "v100" else drawn.blocks | {"block_q": 64}
    try:
        program = schedule.program(problem, build_tiling(schedule.tiling, blocks | fields), device, drawn.p)
    except (ProgramError, SpecError, TilingError) as refused:
        return str(refused)
    try:
        check(program, flag_budget(device))
    except FlagError as refused:  # what no program of so many rings could have
        return str(refused)
    inputs, machine = recipe_source(problem), Machine(device)
    written = execute(program, inputs).tensors
    for cell in program.phases[0].blocks:
        there = written.head(program.tensors["o"], cell.batch, cell.head)[cell.row : cell.row + cell.rows]
        here = Run(problem, cell, inputs, machine, drawn.p).out(drawn.source, "drawn", known(drawn))
        bits = np.dtype(f"u{here.itemsize}")
        if (differ := there.view(bits) != here.view(bits)).any():
            return f"differs: {differ.sum()} of {differ.size} in {cell}"
    return "same"


@pytest.mark.parametrize("number", range(12))
def test_random(number: int, tmp_path: Path) -> None:
    drawn = Drawn(number)
    by_family = schedules(drawn, tmp_path / "drawn.py")
    found = Counter()
    for hw, fields in MACHINES:
        found[outcome(drawn, by_family[device_of(hw).family], hw, fields)] += 1
    print(number, found)
