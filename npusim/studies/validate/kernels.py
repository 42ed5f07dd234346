"""Outputs of complete attention kernels that were recorded on a chip, compared with predicted bits.

Form of the file: bit patterns under ``inputs/<name>/<q|k|v>`` (heads, tokens, head size) and ``<family>/<case>/o``
(heads, rows, head size). In addition to ``o`` a case has ``inputs`` (a name), ``device`` (if absent, the H200) and
options:
``causal`` of ``flash``; ``beta``, ``k_shifted`` and ``state`` of ``pasa``; ``scale``, ``reverse`` and ``fresh`` of
``fp8``.  The schedule is npusim's, with these options, run for its values on the chip's device file.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from npusim.config.load import load_device
from npusim.config.problem import Problem
from npusim.config.tiling import build_tiling
from npusim.errors import SpecError, TensorError
from npusim.formats import get_format
from npusim.library import find_schedule
from npusim.program.numerics.executor import execute
from npusim.simulation.tensor_files import read_tensors
from npusim.studies.validate.vectors import VectorReport, check_vectors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from npusim.program.ir.tile_program import TileProgram
    from npusim.program.numerics.executor import Moment

#: Family of the file -> schedule, format of the inputs, and format of the output.
FAMILIES = MappingProxyType(
    {
        "pasa": ("pasa", "float16", "float16"),
        "flash": ("flash", "float16", "float16"),
        "fp8": ("fp8_attention", "float8_e4m3fn", "float32"),
    }
)
CHIP = "h200"
#: The recurrence's values that the file records after each block, in its order, and the number of rows for which it
#: does.
STATE = ("m_tile", "l_tile", "mean", "f", "m", "l", "e_old", "e_tile")
STATE_ROWS = 16


@dataclass(frozen=True)
class BitsReport:
    """Numbers of recorded outputs that are equal, by name: vectors of matrix units, or outputs of kernels."""

    kind: Literal["vectors", "kernels"]
    reports: Mapping[str, VectorReport]
    left_out: int = 0

    @property
    def is_passed(self) -> bool:
        """Whether every output is equal."""
        return all(r.matched == r.total for r in self.reports.values())


def check_bits(path: Path, only: str = "*") -> BitsReport:
    """Return the number of equal outputs in a file of matrix units' vectors, or of complete kernels; ``only``: a glob.

    Raises `TensorError` as `load_vectors` and `check_kernels`, `SpecError` if ``only`` selects nothing.
    """
    keys = read_tensors(path)
    is_of_kernels = any(key.endswith("/o") for key in keys)
    names = [key.rpartition("/")[0] for key in keys if key.endswith("/o" if is_of_kernels else "/D")]
    reports = check_kernels(path, only) if is_of_kernels else check_vectors(path, only)
    if not reports:
        raise SpecError(f"--only {only!r} selects nothing from {path}")
    left_out = sum(not fnmatchcase(name, only) for name in names)
    return BitsReport("kernels" if is_of_kernels else "vectors", reports, left_out)


def check_kernels(path: Path, only: str = "*") -> dict[str, VectorReport]:
    """Return ``{case: matched and total outputs}`` of the cases that ``only`` (a glob) selects.

    PASA cases report their shifted keys and their recurrence under separate names.

    Raises `TensorError` for keys or shapes of another form, `SpecError` for an unknown device.
    """
    archive = read_tensors(path)
    names = sorted({key.rpartition("/")[0] for key in archive if key.endswith("/o")})
    try:
        return {output: report for name in names if fnmatchcase(name, only) for output, report in _check(archive, name)}
    except (KeyError, ValueError, IndexError, TypeError) as error:
        text = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise TensorError(f"{path}: not a file of recorded kernels: {text}") from error


def _check(archive: Mapping[str, Any], name: str) -> Iterator[tuple[str, VectorReport]]:
    program, inputs = _build(archive, name)
    states: dict[tuple[int, int], Any] = {}
    observers = (_state_recorder(states),) if f"{name}/state" in archive else ()
    done = execute(program, lambda n, b, h: inputs[n][b, h], observers=observers)
    for output in ("o", "k_shifted", "state"):
        if (recorded := archive.get(f"{name}/{output}")) is None:
            continue
        if output == "state":
            heads, blocks = range(inputs["q"].shape[1]), range(1 + max(tile for _, tile in states))
            computed = np.stack([np.stack([states[h, j] for j in blocks]) for h in heads])
        else:
            written = done.tensors.written(program.tensors[output])
            computed = np.stack([written[0, h] for h in range(len(written))])
        yield name if output == "o" else f"{name}:{output}", _compare(computed, recorded, f"{name}/{output}")


def _build(archive: Mapping[str, Any], name: str) -> tuple[TileProgram, dict[str, Any]]:
    """Return a case's program and its inputs, each (1, heads, rows, head size)."""
    family = name.partition("/")[0]
    if family not in FAMILIES:
        raise TensorError(f"{name}: unknown family of kernels; allowed: {', '.join(FAMILIES)}")
    schedule_name, fmt, out = FAMILIES[family]
    device = load_device(str(archive.get(f"{name}/device", CHIP)))
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


def _options(family: str, archive: Mapping[str, Any], name: str) -> tuple[dict[str, object], dict[str, object]]:
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
    """Return an observer that stores the recurrence's row vectors of each head's first rows.

    Values at the beginning of a tile's update, by name.
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


def _compare(computed: NDArray[Any], recorded: NDArray[Any], key: str) -> VectorReport:
    if computed.shape != recorded.shape or computed.dtype.itemsize != recorded.dtype.itemsize:
        is_of = f"{computed.shape} in {computed.dtype}"
        raise TensorError(f"{key} has shape {recorded.shape} in {recorded.dtype}; the kernel's output is {is_of}")
    equal = np.ascontiguousarray(computed).view(recorded.dtype) == recorded
    first = None if equal.all() else str(tuple(int(i[0]) for i in np.nonzero(~equal)))
    return VectorReport(int(equal.sum()), equal.size, first)
