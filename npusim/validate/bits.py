"""Predicted against measured bits: vectors of matrix units, and whole attention kernels of a chip.

Form of a file of kernels: ``golden/README.md``.  Every case names its inputs and options; the schedule is
the product's own, with the kernel's stated options, run for its values on the chip's device file.
"""

from __future__ import annotations

import zipfile
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from npusim.config.load import load_device
from npusim.config.problem import Problem
from npusim.config.tiling import build_tiling
from npusim.errors import NpusimError, SpecError, TensorError
from npusim.formats import get_format
from npusim.formats.archives import MOST_BYTES, check_archive
from npusim.formats.vectors import VectorReport, check_vectors
from npusim.numerics.executor import execute
from npusim.sanitize import regular_file
from npusim.schedules import find_schedule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from npusim.ir.program import TileProgram
    from npusim.numerics.executor import Execution, Moment

#: Family of the file -> schedule, format of the inputs, and format of the output.
FAMILIES: Mapping[str, tuple[str, str, str]] = MappingProxyType(
    {
        "pasa": ("pasa", "float16", "float16"),
        "flash": ("flash", "float16", "float16"),
        "fp8": ("fp8_attention", "float8_e4m3fn", "float32"),
    }
)
CHIP = "h200"
#: The recurrence's values that the file records after each block, in its order, and for how many rows.
STATE = ("m_tile", "l_tile", "mean", "f", "m", "l", "e_old", "e_tile")
STATE_ROWS = 16


@dataclass(frozen=True)
class BitsReport:
    """Matched and total outputs by name: of matrix units, and of whole kernels."""

    vectors: dict[str, VectorReport]
    kernels: dict[str, VectorReport]
    left_out: int

    @property
    def matched(self) -> int:
        """Outputs whose bits are equal."""
        return sum(r.matched for r in (*self.vectors.values(), *self.kernels.values()))

    @property
    def total(self) -> int:
        """Outputs compared."""
        return sum(r.total for r in (*self.vectors.values(), *self.kernels.values()))

    @property
    def is_passed(self) -> bool:
        """Whether every output is equal."""
        return self.matched == self.total


def validate_bits(path: Path, *, only: str | None = None) -> BitsReport:
    """Return how many outputs of a golden file are predicted bit for bit.

    Raises `TensorError` if the file is damaged, holds a pickle, or its arrays do not fit together; `SpecError` if
    ``only`` selects nothing.
    """
    if is_kernel_file(path):
        kernels, left_out = check_kernels(path, only)
        if not kernels:
            raise SpecError(f"--only {only!r} selects no kernel of {path}; families: {', '.join(FAMILIES)}")
        return BitsReport({}, kernels, left_out)
    vectors = dict(check_vectors(path))
    chosen = {n: r for n, r in vectors.items() if only is None or fnmatchcase(n, only)}
    if not chosen:
        raise SpecError(f"--only {only!r} selects none of: {', '.join(sorted(vectors))}")
    return BitsReport(chosen, {}, len(vectors) - len(chosen))


def is_kernel_file(path: Path) -> bool:
    """Return whether an ``.npz`` holds whole kernels rather than vectors of matrix units."""
    try:
        with zipfile.ZipFile(regular_file(path, MOST_BYTES, TensorError)) as archive:
            return any(name.startswith("inputs/") for name in archive.namelist())
    except (OSError, zipfile.BadZipFile) as error:
        raise TensorError(f"{path}: not a readable npz, or truncated: {error}") from None


def check_kernels(path: Path, only: str | None = None) -> tuple[dict[str, VectorReport], int]:
    """Return ``{case: matched and total outputs}`` and how many cases were left out.

    PASA cases report their shifted keys and their recurrence under names of their own.
    """
    reports: dict[str, VectorReport] = {}
    try:
        check_archive(path)
        with np.load(path, allow_pickle=False) as archive:
            names = sorted({k.rpartition("/")[0] for k in archive.files if k.endswith("/o")})
            chosen = [name for name in names if only is None or fnmatchcase(name, only)]
            for name in chosen:
                try:
                    reports.update(_check(archive, name))
                except NpusimError as error:
                    raise TensorError(f"{path}: {name}: {error}") from None
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise TensorError(f"{path}: not a readable file of kernels: {error}") from None
    return reports, len(names) - len(chosen)


def _check(archive: Any, name: str) -> Iterator[tuple[str, VectorReport]]:
    program, inputs = _build(archive, name)
    states: dict[tuple[int, int], Any] = {}
    observers = (_state_recorder(states),) if f"{name}/state" in archive else ()
    done = execute(program, lambda n, b, h: inputs[n][b, h], observers=observers)
    outputs = [output for output in ("o", "k_shifted") if f"{name}/{output}" in archive]
    computed = {output: _gather(done, program, output) for output in outputs}
    if states:
        heads, blocks = range(inputs["q"].shape[1]), range(1 + max(tile for _, tile in states))
        computed["state"] = np.stack([np.stack([states[h, j] for j in blocks]) for h in heads])
    for output, values in computed.items():
        key = f"{name}/{output}"
        recorded = _array(archive, key, np.unsignedinteger, values.ndim)
        yield name if output == "o" else f"{name}:{output}", _compare(values, recorded, key)


def _build(archive: Any, name: str) -> tuple[TileProgram, dict[str, Any]]:
    """Return a case's program and its inputs, each (1, heads, rows, head size)."""
    family = name.partition("/")[0]
    if family not in FAMILIES:
        raise TensorError(f"no family {family!r}; there are {', '.join(FAMILIES)}")
    schedule_name, fmt, out = FAMILIES[family]
    device = load_device(CHIP)
    schedule = find_schedule(schedule_name, device.family)
    source = _array(archive, f"{name}/inputs", np.str_)
    kind = get_format(fmt)
    inputs = {
        n: _array(archive, f"inputs/{source}/{n}", kind.bits_dtype.type, 3).view(kind.dtype)[None]
        for n in ("q", "k", "v")
    }
    rows = _array(archive, f"{name}/o", get_format(out).bits_dtype.type, 3).shape[1]
    inputs["q"] = inputs["q"][:, :, :rows]
    q, k = inputs["q"].shape, inputs["k"].shape
    problem = Problem(
        heads=q[1],
        kv_heads=k[1],
        seq_q=rows,
        seq_kv=k[2],
        head_dim=q[3],
        causal=f"{name}/causal" in archive and _array(archive, f"{name}/causal", np.bool_),
        dtype=fmt,
    )
    tiling, changes = _options(family, archive, name)
    precision: Any = replace(cast("Any", schedule.precision()), output=out, **changes)
    return schedule.program(problem, build_tiling(schedule.tiling, tiling), device, precision), inputs


def _options(family: str, archive: Any, name: str) -> tuple[dict[str, object], dict[str, object]]:
    """Return a case's tiling fields, and its changes to the schedule's default precision."""
    if family == "pasa":
        return {"beta": _array(archive, f"{name}/beta", np.floating)}, {"exp_variant": "exp.hopper_hexp"}
    if family == "flash":
        return {}, {}
    return {}, {
        "scale": _array(archive, f"{name}/scale", np.floating),
        "is_reverse": _array(archive, f"{name}/reverse", np.bool_),
        "fold": False,
        "accumulate": "fresh" if _array(archive, f"{name}/fresh", np.bool_) else "chained",
    }


def _array(archive: Any, key: str, kind: type, axes: int = 0) -> Any:
    """Return the array of a key; raise `TensorError` if it is missing, empty, of another type or of other axes."""
    array = archive.get(key)
    if array is None or not np.issubdtype(array.dtype, kind) or array.ndim != axes or not array.size:
        stored = "missing" if array is None else f"{array.dtype} {array.shape}"
        raise TensorError(f"{key}: {stored}; {kind.__name__} with {axes} axes is needed")
    return array if axes else array.item()


def _gather(done: Execution, program: TileProgram, tensor: str) -> Any:
    heads = done.tensors.written(program.tensors[tensor])
    return np.stack([heads[0, h] for h in range(len(heads))])


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


def _compare(computed: Any, recorded: Any, key: str) -> VectorReport:
    if computed.shape != recorded.shape or computed.itemsize != recorded.itemsize:
        raise TensorError(
            f"{key}: {recorded.dtype} {recorded.shape} in the file, {computed.dtype} {computed.shape} computed"
        )
    bits = np.ascontiguousarray(computed).view(recorded.dtype)
    equal = bits == recorded
    first = None
    if not equal.all():
        at = tuple(int(i[0]) for i in np.nonzero(~equal))
        was = recorded[at].view(computed.dtype)
        width = 2 * recorded.dtype.itemsize
        first = (
            f"{at}: {int(bits[at]):0{width}x} ({computed[at]}) computed, {int(recorded[at]):0{width}x} ({was}) recorded"
        )
    return VectorReport(int(equal.sum()), equal.size, first)
