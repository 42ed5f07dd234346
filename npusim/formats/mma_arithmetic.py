"""The result of one matrix instruction, to the last bit, by name ``<arch>.<op>.k<K>.<in>.<acc>``.

Source of the NVIDIA rows: microsoft/MMA-Sim and north-numerical-computing/MATLAB-tensor-core (parameters only),
confirmed by golden vectors if ``evidence`` says so.  No bit-level description of the Ascend cube is public: its rows
are assumptions, and marked as such.

Where these two models differ, measurements on an H200 decide (492,000 outputs; a selection is in
``tests/formats/corner_h200.npz``): zero products and a zero c do not affect the alignment, a negative sum that rounds
to zero gives +0, and a subnormal float16 c has exponent -14.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain, permutations, product
from types import MappingProxyType
from typing import Any, Literal

from npusim.errors import FormatError
from npusim.formats.float_format import FloatFormat, get_format, lookup
from npusim.formats.mma_tree import AdditionTree, leaf_count, parse_tree
from npusim.late_methods import dataclass

Evidence = Literal["hardware-vectors", "published-model", "assumed", "stated"]
Method = Literal["fused", "exact", "sequential", "grouped", "tree"]
FinalRounding = Literal["toward_zero", "nearest_even"]
CMode = Literal["aligned", "late"]


@dataclass(frozen=True)
class MmaArithmetic:
    """The arithmetic of D = A·B + C in one matrix instruction, and in chains of instructions along k.

    ``fused``: blocks of ``block`` products are added together with c in fixed point: every term is truncated
    (sign-magnitude) to ``fraction_bits`` below the largest exponent among the terms (of products: the sum of the
    operands' exponents, not normalised), the integers are added exactly, and the sum is rounded once.  ``exact``: as
    fused without the truncation.  ``sequential``: one fused multiply-add after another, with ascending k.  ``grouped``:
    runs of ``group`` products that share their scales are added exactly and multiplied by the scales' significands, and
    these sums, not the products, are the terms, which are aligned only by the exponents of their scales, and truncated.

    If the unit has scales, products are multiplied by the scales of their blocks inside the alignment, exactly: for
    ``fused`` and ``exact`` a scale adds to a product's exponent.

    Attributes
    ----------
    name
        Registry name ``<arch>.<op>.k<K>.<in>.<acc>``.
    a_format, b_format, acc_format
        Formats of A, B and of C and D.
    k
        Number of products that one instruction adds per output; K of a matmul is a multiple of it.
    block
        Number of products that are added with one rounding; ``k`` is a multiple of it.
    fraction_bits
        F; None if nothing is truncated.
    rounding
        Rounding of each block's sum into ``acc_format``; toward zero still overflows to Inf.
    kept_fraction_bits
        Fraction bits of a float32 result (13: the E8M13 accumulator), None for all.
    index_groups
        The block of each k of an instruction, if blocks are not ascending runs.
    c_mode
        ``aligned``: c is a term of the first block; ``late``: the blocks start from 0 and c is added last, with an IEEE
        addition to nearest even in ``acc_format``.
    min_alignment_exponent
        Alignment never uses a smaller exponent than this; None: no limit.
    scale_format, scale_block
        Format of the scales of A's rows and B's columns, and the number of k that share one scale; empty and 0 if the
        unit has no scales.
    group
        Products of a group (``grouped``).
    converts_to
        Format to which instructions convert their factors, exactly, before they multiply; empty: there is no such
        format.
    tree
        Any other unit (``tree``): the terms of each addition, and its rounding.
    evidence, source
        ``hardware-vectors`` (every vector of the golden files equal), ``published-model``, ``assumed`` or ``stated`` (a
        name that states its parameters, for which its author has the reason); and the source of the parameters.

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
    min_alignment_exponent: int | None = None
    scale_format: str = ""
    scale_block: int = 0
    group: int = 0
    converts_to: str = ""
    tree: AdditionTree | None = None

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
        if self.tree is not None:
            return f"{self.name} [{self.evidence}]"
        width = "" if self.fraction_bits is None else f", F={self.fraction_bits}"
        kept = "" if self.kept_fraction_bits is None else f" E8M{self.kept_fraction_bits}"
        late = ", c added last" if self.c_mode == "late" else ""
        scaled = f", a {self.scale_format} scale every {self.scale_block}" if self.scale_block else ""
        return (
            f"{self.name}: {self.method}, blocks of {self.block}{width}, {self.rounding}{kept}{late}{scaled} "
            f"[{self.evidence}]"
        )


_FORMAT_OF_INPUT: Mapping[str, str] = MappingProxyType(
    {
        "f16": "float16",
        "bf16": "bfloat16",
        "tf32": "tf32",
        "e4m3": "float8_e4m3fn",
        "e5m2": "float8_e5m2",
        "e2m3": "float6_e2m3fn",
        "e3m2": "float6_e3m2fn",
        "e2m1": "float4_e2m1fn",
        "e1m2": "float4_e1m2",
        "f32": "float32",
        "f64": "float64",
    }
)
_MODEL = "MMA-Sim and MATLAB-tensor-core models"
_SILICON = "golden/mma_h200.npz, golden/mma_leeds.npz"
E8M0 = "float8_e8m0fnu"
_SHORT = ("e4m3", "e5m2", "e2m3", "e3m2", "e2m1")
_FP8 = ("e4m3", "e5m2", "e4m3e5m2", "e5m2e4m3")


def formats_of_inputs(inputs: str) -> tuple[str, str]:
    """Return the formats of A and B: ``e4m3e5m2`` is E4M3 times E5M2; raise `FormatError` for an unknown format."""
    for name, a in _FORMAT_OF_INPUT.items():
        if (rest := inputs.removeprefix(name)) != inputs and rest in _FORMAT_OF_INPUT:
            return a, _FORMAT_OF_INPUT[rest]
    both = lookup(_FORMAT_OF_INPUT, inputs, "input format")
    return both, both


def input_name(a: str, b: str) -> str:
    """Return the names of the formats of A and B in a registry name."""
    short = {name: key for key, name in _FORMAT_OF_INPUT.items()}
    first, second = (lookup(short, name, "input format") for name in (a, b))
    return first if a == b else first + second


def row_for(name: str, a: str, b: str) -> str:
    """Return the name of the row of the same unit that multiplies formats A and B; ``name`` if there is no such row."""
    if a == b or not {a, b} <= set(_FORMAT_OF_INPUT.values()):
        return name
    unit, _, rest = name.rpartition(f".{input_name(a, a)}.")
    both = f"{unit}.{input_name(a, b)}.{rest}"
    return both if both in ARITHMETICS else name


@functools.cache
def sums_key(name: str) -> tuple[MmaArithmetic, ...]:
    """Return a value that is equal for two arithmetics if no operands have different results in them, also where
    `row_for` replaces them: their rows without names and evidence.

    Raises `FormatError` if the name is unknown.
    """
    row = get_arithmetic(name)
    names = [name, *(row_for(name, row.a_format, other) for other in _FORMAT_OF_INPUT.values())]
    return tuple(replace(get_arithmetic(n), name="", evidence="assumed", source="") for n in names)


def _fused(name: str, *, block: int, fraction: int, evidence: Evidence = "published-model") -> MmaArithmetic:
    """Return the fused dot-add row ``name``; float16 results round to nearest, others to zero."""
    _, _, depth, inputs, acc = name.split(".")
    k = int(depth[1:])
    a_format, b_format = formats_of_inputs(inputs)
    # MATLAB-tensor-core: alignment exponents of float32 results are at least -(F + 108), of float16 results 4 - F.
    # Measured for F = 25 on an H200 (tests/formats/corner_h200.npz): -133 and -21, no other value.  FP8 products cannot
    # reach the first limit, and golden vectors of wgmma with 13 fraction bits rule out the second.
    floor = None if fraction == 13 else -(fraction + 108) if acc == "f32" else 4 - fraction
    return MmaArithmetic(
        name=name,
        a_format=a_format,
        b_format=b_format,
        acc_format=_FORMAT_OF_INPUT[acc],
        k=k,
        block=min(k, block),
        fraction_bits=fraction,
        rounding="toward_zero" if acc == "f32" else "nearest_even",
        method="fused",
        evidence=evidence,
        source=_MODEL,
        min_alignment_exponent=floor,
    )


def _half_family(
    unit: str, depths: Mapping[str, tuple[int, ...]], fraction: int, block_bytes: int
) -> Iterator[MmaArithmetic]:
    """Yield the 16- and 19-bit input rows of one unit; a block is ``block_bytes`` of operands."""
    for inputs, ks in depths.items():
        block = block_bytes // (4 if inputs == "tf32" else 2)
        for k in ks:
            for acc in ("f32", "f16") if inputs == "f16" else ("f32",):
                yield _fused(f"{unit}.k{k}.{inputs}.{acc}", block=block, fraction=fraction)


def _fp8(unit: str, ks: tuple[int, ...], block: int, fraction: int, **more: Any) -> Iterator[MmaArithmetic]:
    """Yield the FP8 rows of one unit; with 13 fraction bits its float32 accumulator is E8M13."""
    for inputs, k, acc in product(_FP8, ks, ("f32", "f16")):
        row = _fused(f"{unit}.k{k}.{inputs}.{acc}", block=block, fraction=fraction)
        yield replace(row, kept_fraction_bits=13 if (fraction, acc) == (13, "f32") else None, **more)


def _in_turns(held: int, packed: int = 2, reads: int = 2) -> tuple[tuple[int, ...], ...]:
    """Return the k of each turn, ascending, if four lanes hold ``held`` neighbours along k, ``reads`` times, and a turn
    multiplies ``packed`` of each.
    """
    depth, turns = 4 * held * reads, held // packed
    return tuple(tuple(k for k in range(depth) if k % held // packed == turn) for turn in range(turns))


#: The k of two 16-wide dot-adds, to which one register of a lane with four FP8 factors contributes, pair by pair.
_PAIRS = _in_turns(4)
#: ``mma.sync`` with FP8 on Hopper and Blackwell: two 16-wide dot-adds, after which c is added.
_TWO_STEPS = MappingProxyType({"index_groups": _PAIRS, "c_mode": "late"})
#: Two chained ``mma.sync`` of float16: how Triton's code for Hopper multiplies FP8 if wgmma has too many rows.  All
#: 12,288 outputs of a fused MoE in FP8 in `triton_h200.npz` are equal.
_AS_HALF = MappingProxyType(
    {
        "index_groups": _PAIRS,
        "converts_to": "float16",
        "source": "PTX of Triton 3.6: cvt.rn.f16x2 of the factors, two mma.sync.m16n8k16 of float16",
    }
)


def _held(architecture: str, fraction: int, block_bytes: int) -> Iterator[MmaArithmetic]:
    """Yield chained ``mma.sync`` of factors of which each lane holds more neighbours along k than a register does:
    Triton's code for factors that are converted from narrower elements, or joined.

    The sets of k that an instruction multiplies are measured on an H200 (tests/ttir/turns_h200.npz, every output
    equal); a unit that adds an instruction's products in two blocks is assumed to begin with the lanes' first read.
    """
    for name, reads in (("mma_half", 2), ("mma_quad", 1)):
        wide = 16 * reads, 32 * reads
        depths = {"f16": wide, "bf16": wide, "tf32": (8 * reads, *wide)}
        for row in _half_family(f"{architecture}.{name}", depths, fraction, block_bytes):
            turns = _in_turns(row.k // (4 * reads), 1 if row.a_format == "tf32" else 2, reads)
            order = tuple(chain.from_iterable(turns))
            groups = tuple(order[i : i + row.block] for i in range(0, row.k, row.block))
            source = f"PTX of Triton 3.6, kWidth beyond a register; sums as {architecture}.mma"
            yield replace(row, index_groups=groups if len(groups) > 1 else None, source=source)


#: ``max_num_imprecise_acc`` of Triton: instructions add up from 0, and their sum is added to the accumulator.
_LATE = "PTX of Triton 3.6: wgmma without an accumulator in the first instruction, add.f32 after the last"


def _sequential(
    name: str, a_format: str, b_format: str, acc_format: str, evidence: Evidence, source: str
) -> MmaArithmetic:
    """Return the row of a unit that executes one fused multiply-add after another."""
    return MmaArithmetic(
        name=name,
        a_format=a_format,
        b_format=b_format,
        acc_format=acc_format,
        k=1,
        block=1,
        fraction_bits=None,
        rounding="nearest_even",
        method="sequential",
        evidence=evidence,
        source=source,
    )


def _ascend() -> Iterator[MmaArithmetic]:
    """Yield the default and the two alternates of the Cube (numerics.md §5)."""
    for inputs, k in (("f16", 16), ("bf16", 16), ("e4m3", 32), ("e5m2", 32)):
        fmt = _FORMAT_OF_INPUT[inputs]
        source = f"assumption: one {k}-deep fractal and c, exact sum, one rounding"
        exact = _sequential(f"ascend.cube.k{k}.{inputs}.f32", fmt, fmt, "float32", "assumed", source)
        yield replace(exact, k=k, block=k, method="exact")
        source = "assumption: float32 fused multiply-adds, ascending k"
        yield replace(exact, name=f"ascend.cube_fma.k{k}.{inputs}.f32", k=k, source=source)
        truncating = _fused(f"ascend.cube_rz24.k{k}.{inputs}.f32", block=k, fraction=24, evidence="assumed")
        yield replace(truncating, source="assumption: as a tensor core, F = 24, toward zero")


def _block_scaled(unit: str, pairs: tuple[str, ...]) -> Iterator[MmaArithmetic]:
    """Yield Blackwell's products with one scale per block: mxf8f6f4, mxf4 and nvf4 (block_scaled.md section 3)."""
    for inputs in pairs:
        row = _fused(f"{unit}_mxf8f6f4.k32.{inputs}.f32", block=32, fraction=25)
        yield replace(
            row, scale_format=E8M0, scale_block=32, min_alignment_exponent=None, source="MMA-Sim model, scales aligned"
        )
    for kind, scale, length in (("mxf4", E8M0, 32), ("nvf4", "float8_e4m3fn", 16)):
        yield replace(
            _fused(f"{unit}_{kind}.k64.e2m1.f32", block=64, fraction=35),
            method="grouped",
            group=16,
            scale_format=scale,
            scale_block=length,
            min_alignment_exponent=None,
            source="MMA-Sim model, groups of 16 aligned",
        )


def _ascend_mx() -> Iterator[MmaArithmetic]:
    """Yield possible arithmetics of the 950's MmadMx; its width and order are not public."""
    for inputs in ("e4m3", "e5m2", "e4m3e5m2", "e5m2e4m3", "e2m1", "e1m2", "e2m1e1m2", "e1m2e2m1"):
        a, b = formats_of_inputs(inputs)
        source = "assumption: the 32 products of a scale and c, exact sum, one rounding"
        exact = _sequential(f"ascend.cube_mx.k64.{inputs}.f32", a, b, "float32", "assumed", source)
        yield replace(exact, k=64, block=32, method="exact", scale_format=E8M0, scale_block=32)
        source = "assumption: sums as in a tensor core, with F = 24 and rounding toward zero"
        row = _fused(f"ascend.cube_mx_rz24.k64.{inputs}.f32", block=32, fraction=24, evidence="assumed")
        yield replace(row, min_alignment_exponent=None, scale_format=E8M0, scale_block=32, source=source)


def _chains() -> Iterator[MmaArithmetic]:
    """Yield plain IEEE chains of fused multiply-adds, and chains in a lane of AVX-512, whose float16 operands are
    widened.
    """
    for width, short in (("float64", "f64"), ("float32", "f32")):
        source = "IEEE 754-2019 fusedMultiplyAdd, ascending k"
        yield _sequential(f"ieee.{short}", width, width, width, "published-model", source)
    for inputs, left in (("f16", "float16"), ("f32f16", "float32")):
        source = "VCVTPH2PS, VFMADD231PS: IEEE fusedMultiplyAdd; assumes one chain per result, ascending k"
        yield _sequential(f"avx512.fma.k1.{inputs}.f32", left, "float16", "float32", "assumed", source)


#: Rows for which every golden vector is equal (tested by `tests/formats/test_golden_mma.py`).
_CONFIRMED = frozenset(
    f"{unit}.{row}"
    for unit, rows in {
        "ada.mma": "k32.e4m3.f16 k32.e4m3.f32 k32.e5m2.f16 k32.e5m2.f32 k4.tf32.f32 k8.bf16.f32 k8.f16.f16 k8.f16.f32",
        "ampere.mma": "k4.tf32.f32 k8.bf16.f32 k8.f16.f16 k8.f16.f32",
        "blackwell.mma": "k16.bf16.f32 k16.f16.f16 k16.f16.f32 k32.e4m3.f16 k32.e4m3.f32 k32.e5m2.f16 k32.e5m2.f32 "
        "k4.tf32.f32",
        "hopper.mma": "k16.bf16.f32 k16.f16.f16 k16.f16.f32 k32.e4m3.f16 k32.e4m3.f32 k32.e5m2.f16 k32.e5m2.f32 "
        "k4.tf32.f32 k8.f16.f32 k8.tf32.f32",
        "hopper.wgmma": "k16.bf16.f32 k16.f16.f16 k16.f16.f32 k32.e4m3.f16 k32.e4m3.f32 k32.e4m3e5m2.f32 k32.e5m2.f32",
        "volta.mma": "k4.f16.f16 k4.f16.f32",
    }.items()
    for row in rows.split()
)


def _rows() -> Iterator[MmaArithmetic]:
    f16 = {"f16": (4,)}
    yield from _half_family("volta.mma", f16, 23, 8)
    yield from _half_family("turing.mma", {"f16": (8,)}, 24, 16)
    ampere = {"f16": (8, 16), "bf16": (8, 16), "tf32": (4, 8)}
    yield from _half_family("ampere.mma", ampere, 24, 16)
    yield from _half_family("ada.mma", ampere, 24, 16)
    yield from _fp8("ada.mma", (16, 32), 16, 13)
    yield from _half_family("hopper.mma", ampere, 25, 32)
    yield from _fp8("hopper.mma", (32,), 16, 25, **_TWO_STEPS)
    yield from _fp8("hopper.mma_half", (32,), 16, 25, **_AS_HALF)
    yield from _held("ampere", 24, 16)
    yield from _held("ada", 24, 16)
    yield from _held("hopper", 25, 32)
    yield from _held("rtx_blackwell", 25, 32)
    group = {"f16": (16,), "bf16": (16,), "tf32": (8,)}
    yield from _half_family("hopper.wgmma", group, 25, 32)
    yield from _fp8("hopper.wgmma", (32,), 32, 13)
    late = _fp8("hopper.wgmma_late", (32, 64, 128), 32, 13, c_mode="late", source=_LATE)
    yield from (row for row in late if row.acc_format == "float32")
    yield from _half_family("blackwell.mma", ampere, 25, 32)
    yield from _fp8("blackwell.mma", (32,), 16, 25, **_TWO_STEPS)
    yield from _half_family("blackwell.tcgen05", group, 25, 32)
    yield from _fp8("blackwell.tcgen05", (32,), 32, 25)  # Blackwell's own tensor core
    yield from _half_family("rtx_blackwell.mma", ampere, 25, 32)
    yield from _fp8("rtx_blackwell.mma", (32,), 32, 25)
    yield from _block_scaled("blackwell.tcgen05", (*_SHORT, *map("".join, permutations(_SHORT, 2))))
    yield from _block_scaled("rtx_blackwell.mma", _SHORT)
    yield from _ascend()
    yield from _ascend_mx()
    yield from _chains()


def _with_evidence(row: MmaArithmetic) -> MmaArithmetic:
    if row.name not in _CONFIRMED:
        return row
    return replace(row, evidence="hardware-vectors", source=_SILICON)


ARITHMETICS: Mapping[str, MmaArithmetic] = MappingProxyType({row.name: _with_evidence(row) for row in _rows()})


#: Prefix of the name of an arithmetic that states its parameters.
UNIT = "unit."


def get_arithmetic(name: str | MmaArithmetic) -> MmaArithmetic:
    """Return the arithmetic called ``name``; an :class:`MmaArithmetic` is returned unchanged.

    ``unit.<in>.<acc>:<tree>:<part>-<value>...`` states its own parameters (`AdditionTree`); the slow exact path
    computes such a unit.  Raises `FormatError` if the name is unknown; the message lists near names.

    Examples
    --------
    >>> get_arithmetic("hopper.wgmma.k32.e4m3.f32").fraction_bits
    13
    """
    if isinstance(name, MmaArithmetic):
        return name
    if isinstance(name, str) and name.startswith(UNIT):
        return _stated(name)
    return lookup(ARITHMETICS, name, "arithmetic")


@functools.cache
def _stated(name: str) -> MmaArithmetic:
    """Return the arithmetic whose name states its parameters; raise `FormatError` where the name is malformed."""
    head, _, text = name.partition(":")
    words = head.split(".")
    if len(words) != 3:
        raise FormatError(f"{name!r}: must begin with unit.INPUTS.ACCUMULATOR:, for example unit.f16.f32:(c+0..15)")
    (a, b), (acc, _) = formats_of_inputs(words[1]), formats_of_inputs(words[2])
    tree = parse_tree(text)
    k = leaf_count(tree.tree)
    row = _sequential(name, a, b, acc, "stated", "parameters stated by its name")
    if any(get_format(f).bits > 32 or get_format(f).is_integer for f in (a, b, acc)):
        raise FormatError(f"{name!r}: formats of such a unit have at most 32 bits")
    return replace(row, k=k, block=k, method="tree", tree=tree)


def stated_name(a: str, b: str, acc: str, tree: AdditionTree) -> str:
    """Return the name of a unit, with its parameters."""
    return f"{UNIT}{input_name(a, b)}.{input_name(acc, acc)}:{tree}"
