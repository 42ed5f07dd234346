"""Whole attention kernels recorded on an H200 against predicted bits (form of the file: ``golden/README.md``).

Every case names its inputs and options; the schedule is npusim's own, with the kernel's stated options, run for its
values on the chip's device file.
"""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from npusim.config.load import load_device
from npusim.config.problem import Problem
from npusim.config.tiling import build_tiling
from npusim.formats import get_format
from npusim.numerics.executor import execute
from npusim.schedules import find_schedule
from reports.validation.vectors import VectorReport

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from npusim.ir.program import TileProgram
    from npusim.numerics.executor import Moment

#: Family of the file -> schedule, format of the inputs, and format of the output.
FAMILIES = {
    "pasa": ("pasa", "float16", "float16"),
    "flash": ("flash", "float16", "float16"),
    "fp8": ("fp8_attention", "float8_e4m3fn", "float32"),
}
CHIP = "h200"
#: The recurrence's values that the file records after each block, in its order, and for how many rows.
STATE = ("m_tile", "l_tile", "mean", "f", "m", "l", "e_old", "e_tile")
STATE_ROWS = 16


def check_kernels(path: Path, only: str = "*") -> dict[str, VectorReport]:
    """Return ``{case: matched and total outputs}`` of the cases that ``only`` (a glob) selects.

    PASA cases report their shifted keys and their recurrence under names of their own.
    """
    with np.load(path, allow_pickle=False) as archive:
        names = sorted({k.rpartition("/")[0] for k in archive.files if k.endswith("/o")})
        chosen = [name for name in names if fnmatchcase(name, only)]
        return {output: report for name in chosen for output, report in _check(archive, name)}


def _check(archive: Any, name: str) -> Iterator[tuple[str, VectorReport]]:
    program, inputs = _build(archive, name)
    states: dict[tuple[int, int], Any] = {}
    observers = (_state_recorder(states),) if f"{name}/state" in archive else ()
    done = execute(program, lambda n, b, h: inputs[n][b, h], observers=observers)
    computed = {}
    for output in ("o", "k_shifted"):
        if f"{name}/{output}" in archive:
            written = done.tensors.written(program.tensors[output])
            computed[output] = np.stack([written[0, h] for h in range(len(written))])
    if states:
        heads, blocks = range(inputs["q"].shape[1]), range(1 + max(tile for _, tile in states))
        computed["state"] = np.stack([np.stack([states[h, j] for j in blocks]) for h in heads])
    for output, values in computed.items():
        yield name if output == "o" else f"{name}:{output}", _compare(values, archive[f"{name}/{output}"])


def _build(archive: Any, name: str) -> tuple[TileProgram, dict[str, Any]]:
    """Return a case's program and its inputs, each (1, heads, rows, head size)."""
    family = name.partition("/")[0]
    schedule_name, fmt, out = FAMILIES[family]
    device = load_device(CHIP)
    schedule = find_schedule(schedule_name, device.family)
    source = archive[f"{name}/inputs"].item()
    inputs = {n: archive[f"inputs/{source}/{n}"].view(get_format(fmt).dtype)[None] for n in ("q", "k", "v")}
    rows = archive[f"{name}/o"].shape[1]
    inputs["q"] = inputs["q"][:, :, :rows]
    q, k = inputs["q"].shape, inputs["k"].shape
    is_causal = f"{name}/causal" in archive and archive[f"{name}/causal"].item()
    problem = Problem(heads=q[1], kv_heads=k[1], seq_q=rows, seq_kv=k[2], head_dim=q[3], causal=is_causal, dtype=fmt)
    tiling, changes = _options(family, archive, name)
    precision: Any = replace(cast("Any", schedule.precision()), output=out, **changes)
    return schedule.program(problem, build_tiling(schedule.tiling, tiling), device, precision), inputs


def _options(family: str, archive: Any, name: str) -> tuple[dict[str, object], dict[str, object]]:
    """Return a case's tiling fields, and its changes to the schedule's default precision."""
    if family == "pasa":
        return {"beta": archive[f"{name}/beta"].item()}, {"exp_variant": "exp.hopper_hexp"}
    if family == "flash":
        return {}, {}
    return {}, {
        "scale": archive[f"{name}/scale"].item(),
        "is_reverse": archive[f"{name}/reverse"].item(),
        "fold": False,
        "accumulate": "fresh" if archive[f"{name}/fresh"].item() else "chained",
    }


def _state_recorder(states: dict[tuple[int, int], Any]) -> Callable[[Moment], None]:
    """Return an observer that keeps the recurrence's row vectors of each head's first rows.

    They are what their names hold when a tile's update begins.
    """
    current: dict[str, Any] = {}

    def observe(moment: Moment) -> None:
        if moment.step.name in STATE and moment.result.shape[-1] == 1:
            current[moment.step.name] = np.array(moment.result[:, :STATE_ROWS, 0])
        elif moment.resolved.op.label == "update" and moment.index == 0:
            tile = moment.resolved.path[-1][1]
            for lane, block in enumerate(moment.blocks):
                if block.row == 0:
                    states[block.head, tile] = np.stack([current[n][lane] for n in STATE], axis=-1)

    return observe


def _compare(computed: Any, recorded: Any) -> VectorReport:
    assert computed.shape == recorded.shape
    equal = np.ascontiguousarray(computed).view(recorded.dtype) == recorded
    first = None if equal.all() else str(tuple(int(i[0]) for i in np.nonzero(~equal)))
    return VectorReport(int(equal.sum()), equal.size, first)
