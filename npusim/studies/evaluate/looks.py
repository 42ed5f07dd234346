"""Likely faults of a wrong output: the first wrong element, and the fault that would cause it."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from npusim.formats.cast import widen
from npusim.program.numerics.paths import Place
from npusim.program.numerics.reference import attention_scores, softmax_weights

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from npusim.program.numerics.evaluate import BlockRows
    from npusim.studies.validate.diff import HeldOutput

    Rows = Mapping[BlockRows, NDArray[Any]]
    Doubles = NDArray[np.float64]

#: Share of the error that a named fault may leave unexplained.
EXPLAINED = 0.1
#: Keys of a tile that a faulty kernel may omit.
TILES = (16, 32, 64, 128, 256)
#: Factors of the scale that are tried, in steps of one percent.
SCALES = tuple(1.01**n for n in range(-140, 141) if n)
#: Faults for which a launch is refused, by words of the refusal (`npusim.kernels.triton`).
REFUSED = MappingProxyType({"no mask prevents it": "out of bounds", "of them never": "an unwritten part"})


@dataclass(frozen=True)
class WrongElement:
    """The first wrong element (batch, head, row, column), its value, the exact value, and the fault to which it points.

    Values that are NaN or Inf are text, since JSON has no number for them.
    """

    at: tuple[int, int, int, int]
    value: float | str
    exact: float | str
    looks_like: str


def first_wrong(given: Rows, exact: Rows, allowed: float) -> tuple[int, int, int, int]:
    """Return the first element whose error is above ``allowed`` or not finite; if there is none, the element with the
    largest error.
    """
    worst, largest = (0, 0, 0, 0), -1.0
    for (n, h, row), block in sorted(exact.items()):
        errors = np.abs(widen(given[n, h, row]).astype(np.float64) - block)
        errors = np.where(np.isnan(errors), np.inf, errors)
        errors = np.where(np.isfinite(block), errors, 0.0)
        over = np.argwhere(errors > allowed)
        if len(over):
            return n, h, row + int(over[0][0]), int(over[0][1])
        if errors.max() > largest:
            at = np.unravel_index(int(errors.argmax()), errors.shape)
            worst, largest = (n, h, row + int(at[0]), int(at[1])), float(errors.max())
    return worst


def of_values(given: Rows, exact: Rows, allowed: float) -> str:
    """Return the fault that explains the values, up to the share `EXPLAINED`; empty if there is none."""
    own, right = (
        np.concatenate([widen(rows[at]).astype(np.float64) for at in sorted(exact)]) for rows in (given, exact)
    )
    lost = ~np.isfinite(own) & np.isfinite(right)
    if lost.any():
        return _of_lost(own, lost)
    if not own.any():
        return "zeros: the kernel writes nothing, or a constant"
    if np.ptp(own) == 0:
        return f"a constant output, {own.flat[0]:.4g} everywhere"
    wrong = np.abs(own - right) > allowed
    zeros = (own == 0) & wrong
    if wrong.any() and (zeros.sum() > 0.9 * wrong.sum()):
        return f"an unwritten part: zeros in {_part(zeros)}"
    factor = float((own * right).sum() / max(float((right * right).sum()), 1e-300))
    if _is_explained(own, right, factor * right) and abs(factor - 1) > 1e-6:
        return f"a scale: outputs are {factor:.4g} times the exact ones"
    moved = float((own - right).mean())
    if _is_explained(own, right, right + moved):
        return f"an offset: outputs are the exact ones plus {moved:.4g}"
    if len(own) > 1 and _is_explained(own[1:], right[1:], right[:-1]):
        return "rows that are shifted by one"
    if own.shape[1] > 1 and _is_explained(own[:, ::-1], right[:, ::-1], right):
        return "columns in reverse"
    few = wrong.mean()
    return f"only a part is wrong: {_part(wrong)}" if 0 < few < 0.5 else ""


def of_refusal(text: str) -> str:
    """Return the fault of the kernel for which a launch is refused; empty where npusim does not read it."""
    return next((fault for words, fault in REFUSED.items() if words in text), "")


def _is_explained(own: Doubles, right: Doubles, fault: Doubles) -> bool:
    before, after = float(np.square(own - right).sum()), float(np.square(own - fault).sum())
    return after <= EXPLAINED**2 * before


def _of_lost(own: Doubles, lost: NDArray[np.bool_]) -> str:
    rows = lost.all(axis=1)
    if rows.any():
        return f"an uninitialised or unwritten part: {_part(lost)} is NaN or Inf"
    return f"out of range: {'NaN' if np.isnan(own).any() else 'Inf'} in {_part(lost)}"


def _part(wrong: NDArray[np.bool_]) -> str:
    """Return where elements are wrong, in words: rows and columns, counted over all judged rows."""
    rows, columns = np.flatnonzero(wrong.any(axis=1)), np.flatnonzero(wrong.any(axis=0))
    of_rows = "all rows" if len(rows) == len(wrong) else f"{len(rows)} of {len(wrong)} rows"
    whole = len(columns) == wrong.shape[1]
    return of_rows if whole else f"columns {columns[0]}..{columns[-1]} of {of_rows}"


def of_attention(held: HeldOutput, written: Rows, at: tuple[int, int, int, int]) -> str:
    """Return the fault of an attention at a wrong element: another problem's output, or a missing tile."""
    batch, head, row, _ = at
    problem = held.subject.attention
    if problem is None:
        return ""
    neighbour = held.neighbour(Place(row, head, batch), written)
    if neighbour is not None:
        kind = "a scale" if "scale" in neighbour.change else "another function"
        is_mask = neighbour.change.partition("=")[0] in (
            "causal",
            "causal_offset",
            "window",
            "sinks",
            "prefix",
            "chunk",
        )
        return f"{'a mask' if is_mask else kind}: {neighbour}"
    return _dropped(held, at)


def _dropped(held: HeldOutput, at: tuple[int, int, int, int]) -> str:
    """Return the keys of a row that are missing or counted twice, or the row's scale; empty if neither explains the
    row.
    """
    batch, head, row, _ = at
    problem = held.subject.attention
    if problem is None or held.plan.schedule.sees is not None:
        return ""
    kv = head // problem.group_size
    q, k, v = (widen(held.source(n, batch, h)).astype(np.float64) for n, h in (("q", head), ("k", kv), ("v", kv)))
    weights = softmax_weights(attention_scores(q[row : row + 1], k, problem.sequence(batch), row, head))[0]
    v = np.where(np.isfinite(v), v, 0.0) * problem.v_scale
    own, exact = held.given.values[batch, head, row].astype(np.float64), weights @ v / weights.sum()
    best = (EXPLAINED**2 * float(np.square(own - exact).sum()), "")
    for words, part, factor in _parts(len(k)):
        total = weights.sum() + factor * weights[part].sum()
        if total > 0:
            fault = (weights @ v + factor * weights[part] @ v[part]) / total
            best = min(best, (float(np.square(own - fault).sum()), f"a tile {words} at row {row}"))
    for factor in SCALES:
        scaled = weights**factor
        fault = scaled @ v / scaled.sum()
        best = min(best, (float(np.square(own - fault).sum()), f"a scale: scores are about {factor:.4g} times theirs"))
    return best[1]


def _parts(keys: int) -> Iterator[tuple[str, slice, float]]:
    """Yield keys that may be missing or counted twice, in words, with the share by which their weights change."""
    for tile in (t for t in TILES if t < keys):
        for start in range(0, keys, tile):
            ends = {(start, min(start + tile, keys))} | ({(0, start), (start, keys)} if start else set())
            for first, last in sorted(ends):
                yield f"dropped: keys {first}..{last - 1}", slice(first, last), -1.0
            yield f"counted twice: keys {start}..{min(start + tile, keys) - 1}", slice(start, start + tile), 1.0
