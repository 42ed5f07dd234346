"""What one matrix instruction computes, to the last bit, as a frozen printable value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from npusim.formats.float_format import FloatFormat, get_format

Evidence = Literal["hardware-vectors", "published-model", "assumed"]
Method = Literal["fused", "exact", "sequential"]
FinalRounding = Literal["toward_zero", "nearest_even"]
CMode = Literal["aligned", "late"]


@dataclass(frozen=True)
class MmaArithmetic:
    """The arithmetic of D = A·B + C in one matrix instruction, and of chains of them along k.

    ``fused``: blocks of ``block`` products are added together with c in fixed point: every term
    is truncated (sign-magnitude) to ``fraction_bits`` below the largest exponent among the terms
    (of products: the sum of the operands' exponents, not normalised), the integers are added
    exactly, and the sum is rounded once.  ``exact``: as fused without the truncation.
    ``sequential``: one fused multiply-add after the other, ascending k.

    Attributes
    ----------
    name
        Registry name ``<arch>.<op>.k<K>.<in>.<acc>``.
    a_format, b_format, acc_format
        Formats of A, B and of C and D.
    k
        Products one instruction adds per output; K of a matmul is a multiple of it.
    block
        Products added in one rounding; ``k`` is a multiple of it.
    fraction_bits
        F; None if nothing is truncated.
    rounding
        Rounding of each block's sum into ``acc_format``; toward zero still overflows to Inf.
    kept_fraction_bits
        Fraction bits kept in a float32 result (13: the E8M13 accumulator), None for all.
    index_groups
        Which k of an instruction go into which block, if not ascending runs.
    c_mode
        ``aligned``: c takes part in the first block; ``late``: the blocks start from 0 and c is
        added last, with an IEEE addition to nearest even in ``acc_format``.
    zero_exponent
        Exponent a zero product or zero c contributes to the alignment; None: it contributes
        nothing (every unit of the registry; MMA-Sim says -126).
    min_alignment_exponent
        Alignment never uses a smaller exponent than this; None: no limit.
    evidence, source
        ``hardware-vectors`` (every vector of the golden files equal), ``published-model`` or
        ``assumed``; and where the parameters come from.

    Notes
    -----
    NaN results are canonical (sign 0, all bits 1), a fused sum that is or rounds to zero gives +0,
    and Inf or NaN operands follow IEEE rules.  Products that exceed the float32 range while
    finite do not overflow.
    """

    name: str
    a_format: str
    b_format: str
    acc_format: str
    k: int
    block: int
    fraction_bits: int | None
    rounding: FinalRounding
    method: Method
    evidence: Evidence
    source: str
    kept_fraction_bits: int | None = None
    index_groups: tuple[tuple[int, ...], ...] | None = None
    c_mode: CMode = "aligned"
    zero_exponent: int | None = None
    min_alignment_exponent: int | None = None

    @property
    def a(self) -> FloatFormat:
        """Format of A."""
        return get_format(self.a_format)

    @property
    def b(self) -> FloatFormat:
        """Format of B."""
        return get_format(self.b_format)

    @property
    def acc(self) -> FloatFormat:
        """Format of C and D."""
        return get_format(self.acc_format)

    def __str__(self) -> str:
        width = "" if self.fraction_bits is None else f", F={self.fraction_bits}"
        kept = "" if self.kept_fraction_bits is None else f" E8M{self.kept_fraction_bits}"
        late = ", c added last" if self.c_mode == "late" else ""
        return (
            f"{self.name}: {self.method}, blocks of {self.block}{width}, {self.rounding}{kept}{late} [{self.evidence}]"
        )
