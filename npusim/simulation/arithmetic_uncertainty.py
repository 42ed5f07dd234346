"""How far a result depends on an assumed arithmetic: the same run with each alternative."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from npusim.errors import SpecError
from npusim.formats import ARITHMETICS, get_arithmetic
from npusim.formats.reductions import ORDERS
from npusim.numerics.evaluate import evaluate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from npusim.config.device import DeviceSpec
    from npusim.config.problem import Problem
    from npusim.ir.program import TileProgram
    from npusim.numerics.executor import HeadSource
    from npusim.numerics.result import NumericResult


@dataclass(frozen=True, slots=True)
class Spread:
    """Outputs under another arithmetic against those of the run, over the rows of one head.

    ``arithmetic`` is its registry name, or ``row sums in <order>``.  ``rmse`` is the relative
    Frobenius distance, ``differing`` the share of outputs whose bits differ; both None where the
    other's outputs are not all finite.
    """

    arithmetic: str
    rmse: float | None
    differing: float | None


def alternates(name: str) -> tuple[str, ...]:
    """Return the other assumed arithmetics with the operands and accumulator of ``name``."""
    chosen = get_arithmetic(name)
    if chosen.evidence != "assumed":
        return ()
    unit = name.partition(".")[0]
    kind = (chosen.a_format, chosen.b_format, chosen.acc_format)
    return tuple(
        other
        for other, a in ARITHMETICS.items()
        if other != name
        and a.evidence == "assumed"
        and other.startswith(f"{unit}.")
        and (a.a_format, a.b_format, a.acc_format) == kind
    )


def row_sum_evidence(bits: NumericResult, device: DeviceSpec) -> dict[str, str]:
    """Return ``{order of row sums: basis in the device's file}``, ``chosen`` where it is another's."""
    own = device.row_sum
    return {order: own.basis if own is not None and own.value == order else "chosen" for order in bits.row_sum_orders}


def _alternatives(bits: NumericResult, device: DeviceSpec) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield a name and the changed field of the precision for whatever could be otherwise."""
    for name in sorted({other for used in bits.arithmetic for other in alternates(used)}):
        yield name, {"arithmetic": name}
    for used, basis in row_sum_evidence(bits, device).items():
        # A vector unit adds lanes side by side: no order of its is a sequence.
        others = (o for o in ORDERS if o not in (used, "sequential"))
        for other in others if basis == "assumed" else ():
            yield f"row sums in {other}", {"sum_order": other}


def spread_over_alternates(
    bits: NumericResult,
    problem: Problem,
    inputs: HeadSource,
    device: DeviceSpec,
    rebuild: Callable[[dict[str, str]], TileProgram],
) -> tuple[Spread, ...]:
    """Return how much the first computed block changes under each alternative arithmetic.

    ``rebuild(changes)`` gives the program with fields of the precision changed, or raises `SpecError` where
    the schedule has no such choice.  Nothing is assumed:
    no alternatives.  An output that is not finite is at no distance from another: none either.
    """
    if not bits.rows:
        return ()
    batch, head, row = next(iter(bits.rows))
    before = bits.rows[batch, head, row].astype(np.float64)
    if not np.isfinite(before).all():
        return ()
    found = []
    for name, changes in _alternatives(bits, device):
        try:
            program = rebuild(changes)
        except SpecError:  # the schedule leaves no choice of it
            continue
        again = evaluate(program, problem, inputs, rows=[row], heads=[head])
        after = again.rows[batch, head, row].astype(np.float64)
        found.append(Spread(name, *_distance(before, after)))
    return tuple(found)


def _distance(before: NDArray[Any], after: NDArray[Any]) -> tuple[float | None, float | None]:
    """Return the relative distance, and the share of differing values; None if not all are finite."""
    if not np.isfinite(after).all():
        return None, None
    norm = float(np.sqrt((before**2).sum()))
    distance = float(np.sqrt(((after - before) ** 2).sum()))
    return distance / norm if norm else 0.0, float((after != before).mean())
