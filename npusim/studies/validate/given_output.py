"""A kernel's output, from a file or an array: its values, and the rows and heads that it has."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from npusim.errors import TensorError, absent
from npusim.formats import get_format
from npusim.simulation.tensor_files import read_tensors
from npusim.units import spans

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from npusim.program.numerics.evaluate import BlockRows, Choice
    from npusim.simulation.evaluation import Subject

#: Keys under which a file may contain the output, and the key of the mask of its rows.
KEYS, COMPUTED = ("o", "out", "output"), "computed"
#: Advice on rows that are NaN.
BLANK = "if the kernel computed only some rows, name these with --rows and --heads"
#: Number of spans of rows that a message lists.
SHOWN = 3


@dataclass(frozen=True)
class GivenOutput:
    """An output ``values`` (batch, heads, rows, columns) in the run's format, read from ``where``.

    ``has`` (batch, heads, rows): the rows that the output has; all rows unless ``is_stated``, by the key `COMPUTED`.
    """

    where: str
    values: NDArray[Any]
    has: NDArray[np.bool_]
    is_stated: bool = False

    def asked(self, rows: Choice, heads: Choice) -> tuple[Choice, Choice]:
        """Return the rows and the heads to compare: those that a file states instead of a sample."""
        stated: list[Choice] = [np.flatnonzero(self.has.any(axis)).tolist() for axis in ((0, 1), (0, 2))]
        choices = zip((rows, heads), stated, strict=True)
        both = [default if self.is_stated and one == "sample" else one for one, default in choices]
        return both[0], both[1]

    def cut(self, blocks: Mapping[BlockRows, NDArray[Any]]) -> dict[BlockRows, NDArray[Any]]:
        """Return the parts of blocks of rows that the output has, by batch, head and first row.

        Raises `TensorError` if the output has none of them.
        """
        parts: dict[BlockRows, NDArray[Any]] = {}
        for (n, h, row), block in blocks.items():
            held = self.has[n, h, row : row + len(block)]
            parts |= {(n, h, row + first): block[first : last + 1] for first, last in spans(np.flatnonzero(held))}
        if not parts:
            asked = {at: np.ones(len(block), np.bool_) for at, block in blocks.items()}
            raise TensorError(
                f"{self.where}: has {_in_words(self._rows(self.has))}, but none of the rows to compare "
                f"({_in_words(asked)}); choose others with --rows and --heads"
            )
        return parts

    def beside(self, blocks: Mapping[BlockRows, NDArray[Any]]) -> dict[BlockRows, NDArray[Any]]:
        """Return the output's rows at the positions of blocks of rows."""
        return {(n, h, row): self.values[n, h, row : row + len(b)] for (n, h, row), b in blocks.items()}

    def blank(self, predicted: Mapping[BlockRows, NDArray[Any]]) -> str:
        """Return in words the rows that are all NaN where the prediction has numbers; empty if there are none."""
        given = self.beside(predicted)
        all_nan = {
            at: np.asarray(_is_nan(rows).all(axis=1) & ~_is_nan(predicted[at]).all(axis=1))
            for at, rows in given.items()
        }
        return _in_words(all_nan) if any(rows.any() for rows in all_nan.values()) else ""

    @staticmethod
    def _rows(has: NDArray[np.bool_]) -> dict[BlockRows, NDArray[np.bool_]]:
        return {(n, h, 0): has[n, h] for n in range(len(has)) for h in range(has.shape[1])}


def _is_nan(values: NDArray[Any]) -> NDArray[np.bool_]:
    return np.isnan(values.astype(np.float64))


def _in_words(chosen: Mapping[BlockRows, NDArray[np.bool_]]) -> str:
    """Return the chosen rows in words: ``rows 0..63 of batch 0 head 0 and 3 more heads``, those of the first head."""
    by_head: dict[tuple[int, int], list[int]] = {}
    for (n, h, row), which in sorted(chosen.items()):
        if which.any():
            by_head.setdefault((n, h), []).extend(row + np.flatnonzero(which))
    if not by_head:
        return "no rows"
    (batch, head), rows = next(iter(by_head.items()))
    listed = spans(rows)
    text = ", ".join(f"{a}..{b}" for a, b in listed[:SHOWN]) + (", ..." if len(listed) > SHOWN else "")
    others = len(by_head) - 1
    more = f" and of {others} more head{'s' if others > 1 else ''}" if others else ""
    return f"rows {text} of batch {batch} head {head}{more}"


def check_output_file(output: object) -> None:
    """Raise `TensorError` for the name of a file that does not exist; arrays are not checked."""
    if isinstance(output, str | Path) and not Path(output).is_file():
        raise TensorError(
            f"{output}: {absent(Path(output))}; it must be an .npz or .safetensors with the kernel's output"
        )


def read_output(output: str | Path | NDArray[Any], subject: Subject, fmt: str) -> GivenOutput:
    """Return a kernel's output; see `npusim.studies.validate.diff.diff`.

    ``fmt``: the run's format.  Raises `TensorError` for a file that cannot be read or has no output, and for another
    shape or dtype.
    """
    where, values = "output", output
    stated: NDArray[Any] | None = None
    if isinstance(values, str | Path):
        where = str(values)
        check_output_file(values)
        arrays = read_tensors(Path(values))
        stated = arrays.pop(COMPUTED, None)
        values = _picked(arrays, where)
    sizes = subject.output
    shape = (sizes.batch, sizes.heads, sizes.seq_q, sizes.output_cols)
    is_free = subject.attention is None  # a kernel of plain tensors may have its result in another shape
    if values.size == prod(shape) and (is_free or values.shape == shape[1:]):
        values = values.reshape(shape)
    if values.shape != shape:
        raise TensorError(
            f"{where}: the output has shape {values.shape}; this run's has {shape} (batch, heads, rows, head size)"
        )
    has = np.ones(shape[:3], np.bool_) if stated is None else _has(stated, shape[:3], where)
    return GivenOutput(where, _in_format(values, fmt, where), has, stated is not None)


def _has(stated: NDArray[Any], shape: tuple[int, ...], where: str) -> NDArray[np.bool_]:
    if stated.size != prod(shape) or stated.dtype.kind not in "bui":
        raise TensorError(
            f"{where}: {COMPUTED} is {stated.dtype} of shape {stated.shape}; it must have 0 or 1 for each of "
            f"{shape} (batch, heads, rows), 1 for the rows that the output has"
        )
    return np.asarray(stated.reshape(shape) != 0)


def _in_format(values: NDArray[Any], fmt: str, where: str) -> NDArray[Any]:
    """Return values in the run's format, from such values or their bit patterns."""
    dtype = get_format(fmt).dtype
    if values.dtype in (np.dtype(f"u{dtype.itemsize}"), np.dtype(f"V{dtype.itemsize}")):  # .npz has bfloat16 as V2
        return values.view(dtype)
    if values.dtype != dtype:
        raise TensorError(
            f"{where}: the output is {values.dtype}; this run's is {fmt}, or its bit patterns as "
            f"u{dtype.itemsize}; choose another output format with --precision output=..."
        )
    return values


def _picked(arrays: dict[str, NDArray[Any]], where: str) -> NDArray[Any]:
    name = next((key for key in KEYS if key in arrays), next(iter(arrays)) if len(arrays) == 1 else None)
    if name is None:
        listed = ", ".join(arrays) or "nothing"
        raise TensorError(f"{where}: there is no key {', '.join(KEYS)}; its keys are {listed}")
    return arrays[name]
