"""How far a result depends on an assumed matrix arithmetic: the same run with each alternative."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from npusim.formats import ARITHMETICS, get_arithmetic
from npusim.numerics.evaluate import evaluate

if TYPE_CHECKING:
    from collections.abc import Callable

    from npusim.ir.program import TileProgram
    from npusim.numerics.result import NumericResult
    from npusim.numerics.store import HeadSource
    from npusim.spec.problem import Problem


@dataclass(frozen=True, slots=True)
class Spread:
    """Outputs under another arithmetic against those of the run, over the rows of one head.

    ``rmse`` is the relative Frobenius distance, ``differing`` the share of outputs whose bits
    differ.
    """

    arithmetic: str
    rmse: float
    differing: float


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
        if other != name and a.evidence == "assumed" and other.startswith(f"{unit}.")
        and (a.a_format, a.b_format, a.acc_format) == kind
    )  # fmt: skip


def spread_over_alternates(
    bits: NumericResult,
    problem: Problem,
    inputs: HeadSource,
    rebuild: Callable[[str], TileProgram],
) -> tuple[Spread, ...]:
    """Return how much the first computed block changes under each alternative arithmetic.

    ``rebuild(name)`` gives the program with that arithmetic.  Nothing is assumed: no alternatives.
    """
    found = []
    if not bits.rows:
        return ()
    batch, head, row = next(iter(bits.rows))
    before = bits.rows[batch, head, row].astype(np.float64)
    for name in {other for used in bits.arithmetic for other in alternates(used)}:
        again = evaluate(rebuild(name), problem, inputs, rows=[row], heads=[head])
        after = again.rows[batch, head, row].astype(np.float64)
        norm = float(np.sqrt(np.nansum(before**2)))
        with np.errstate(invalid="ignore"):  # Inf in both is no difference
            distance = float(np.sqrt(np.nansum((after - before) ** 2)))
        found.append(
            Spread(
                name,
                distance / norm if norm else 0.0,
                float(((after != before) & ~(np.isnan(after) & np.isnan(before))).mean()),
            )
        )
    return tuple(sorted(found, key=lambda s: s.arithmetic))
