"""Probes of a vector core (row sums, maxima, functions, division, casts, multiply-adds), and their explanations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import combinations, product
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from npusim.errors import FormatError
from npusim.formats import cast, get_format, reduce_max, reduce_sum, unary
from npusim.formats.cast import NAN_RULES, OVERFLOWS, widen
from npusim.formats.elementwise import add, div, fma, mul
from npusim.formats.mma_tree import ROUNDED
from npusim.formats.reductions import ORDERS
from npusim.studies.probe.trees import in_words, swallowing_tree

if TYPE_CHECKING:
    from npusim.formats.cast import Array

#: The ways to compute an operation, by name.
Ways = dict[str, Callable[..., "Array"]]
#: Columns of the rows that are summed: all pairs of the first rows, some pairs of the others.
COLUMNS = (64, 100, 128, 256)
#: First columns of the tested pairs if not all pairs are tested.
FIRST = (0, 1, 5, 77)
SAMPLES = 8192
FUNCTIONS = ("exp", "exp2", "rsqrt", "tanh")
#: M of rows that are summed, and the unit of its weights, which M hides in float32 too.
LARGE = MappingProxyType({"float16": (2.0**15, 2.0**-24), "float32": (2.0**60, 2.0**-10)})
#: Targets of the casts of float32.
TARGETS = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


@dataclass(frozen=True)
class VectorCase:
    """One operation: its name, the format of its inputs, their keys in the file, and the format of its results."""

    operation: str
    fmt: str
    inputs: tuple[str, ...]
    out: str


def cases() -> dict[str, VectorCase]:
    """Return the tested operations, by key."""
    listed = {f"cast.{target}": VectorCase("cast", "float32", (f"ties.{target}",), target) for target in TARGETS}
    for f in ("float16", "float32"):
        operands = {"max": ("nans",), "div": ("x", "y"), "fma": ("x", "y", "z")}
        operands |= dict.fromkeys(FUNCTIONS, ("all" if f == "float16" else "x",))
        for name, keys in operands.items():
            listed[f"{name}.{f}"] = VectorCase(name, f, tuple(f"{key}.{f}" for key in keys), f)
        for n in COLUMNS:
            listed[f"sum.{f}@{n}"] = VectorCase("sum", f, (f"rows.{f}@{n}",), f)
    return listed


def inputs(seed: int = 7) -> dict[str, Array]:
    """Return the inputs of `cases` by key, in their formats' dtypes."""
    rng = np.random.default_rng(seed)
    arrays = {f"ties.{target}": tie_probes(target) for target in TARGETS}
    arrays["all.float16"] = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    special = [np.nan, 1.0, -0.0, 0.0, -np.inf, np.inf]
    pairs = np.array(list(product(special, special)))
    for name in ("float16", "float32"):
        arrays |= {f"rows.{name}@{n}": row_probes(n, name)[0] for n in COLUMNS}
        nans = np.concatenate([pairs, np.full((len(pairs), 62), -3.0)], 1)
        arrays[f"nans.{name}"] = nans.astype(get_format(name).dtype)
        for key in "xyz":
            spread = rng.uniform(-4, 4, SAMPLES) * (rng.random(SAMPLES) < 0.7)
            values = (rng.standard_normal(SAMPLES) * 2.0**spread).astype(np.float32)
            arrays[f"{key}.{name}"] = np.asarray(cast(values, name))
    return arrays


def row_probes(n: int, fmt: str) -> tuple[Array, list[tuple[int, int]], list[int]]:
    """Return rows whose sums show the order of their additions, the pairs of M and -M, and the weights elsewhere."""
    large, unit = LARGE[fmt]
    weights = [1 + (k % 16 + k // 16) % 23 for k in range(n)]
    pairs = [(i, j) for i, j in combinations(range(n), 2) if n == COLUMNS[0] or i in FIRST]
    x = np.tile(np.array(weights) * unit, (len(pairs), 1))
    for row, (i, j) in enumerate(pairs):
        x[row, i], x[row, j] = large, -large
    return np.asarray(cast(x.astype(np.float32), fmt)), pairs, weights


def tie_probes(target: str) -> Array:
    """Return float32 values at the midpoints between a format's neighbours, one ulp to each side, at its limits, and
    Inf and NaN.
    """
    f = get_format(target)
    codes = np.arange(f.max_code, dtype=f.bits_dtype)
    # for a 16-bit format, every 53rd code and the codes near the subnormals and near the largest numbers
    if len(codes) > 1 << 12:
        codes = np.unique(np.concatenate([codes[::53], codes[1:64], codes[-64:]]))
    low = widen(codes.view(f.dtype)).astype(np.float64)
    high = widen((codes + np.ones_like(codes)).view(f.dtype)).astype(np.float64)
    middle = ((low + high) / 2).astype(np.float32)
    last = f.max_finite - float(low[-1])
    outside = [f.max_finite, f.max_finite + last / 2, f.max_finite + last, f.max_finite * 2, 3e38]
    some = np.concatenate([middle, np.minimum(outside, np.finfo(np.float32).max).astype(np.float32)])
    special = np.array([0x7F800000, 0x7FC00000, 0x7F800001, 0x7FFFFFFF, 0x7FC02000, 0], np.uint32).view(np.float32)
    some = np.concatenate([some, *(np.nextafter(some, np.float32(to)) for to in (0, 3e38)), special])
    return np.concatenate([some, -some])


# ---------------------------------------------------------------- what explains the results


@dataclass(frozen=True)
class OperationResult:
    """The explanation of an operation's results: the ``answers`` that all results have in common, and the numbers of
    results that are ``explained`` and ``asked``.

    ``answers`` is empty where nothing explains all; ``best`` is the answer that explains most, ``note`` a remark.
    """

    key: str
    question: str
    answers: tuple[str, ...]
    explained: int
    asked: int
    best: str = ""
    note: str = ""


def _sums(fmt: str) -> Ways:
    lanes = (f"lanes_{n}x{m}x{w}" for n in (1, 2, 4, 8) for m in (1, 2, 4, 8, 16, 32) for w in (1, 2, 4, 8))
    return {order: lambda x, order=order: reduce_sum(x, fmt, order) for order in (*ORDERS, *lanes)}


def _maxima(fmt: str) -> Ways:
    def of_nan(x: Array) -> Array:
        return np.asarray(np.where(np.isnan(x).any(axis=-1), np.array(np.nan, x.dtype), reduce_max(x, fmt)))

    return {"numbers win over NaN": lambda x: reduce_max(x, fmt), "a NaN makes NaN": of_nan}


def _function(name: str, fmt: str) -> Ways:
    known = (variant for variant, about in unary.VARIANTS[name].items() if fmt in about.formats)
    return {variant: lambda x, v=variant: getattr(unary, name)(x, fmt, variant=v) for variant in known}


def _casts(out: str) -> Ways:
    return {
        f"{rounding}, overflow {overflow}, NaN {nan}": partial(
            cast, fmt=out, rounding=rounding, overflow=overflow, nan=nan
        )
        for rounding, overflow, nan in product(ROUNDED, OVERFLOWS, NAN_RULES)
    }


def _divisions(fmt: str) -> Ways:
    return {
        "correctly rounded": lambda x, y: div(x, y, fmt),
        "times the correctly rounded reciprocal": lambda x, y: mul(x, unary.rcp(y, fmt), fmt),
    }


def _multiply_adds(fmt: str) -> Ways:
    return {
        "one rounding": lambda x, y, z: fma(x, y, z, fmt),
        "two roundings": lambda x, y, z: add(mul(x, y, fmt), z, fmt),
    }


#: For each operation, its question and the ways to compute it in a format.
OPTIONS: Mapping[str, tuple[str, Callable[[str], Ways]]] = MappingProxyType(
    {
        "sum": ("order of a row's sum", _sums),
        "max": ("maximum of a row", _maxima),
        "cast": ("cast from float32 to", _casts),
        "div": ("division", _divisions),
        "fma": ("product and sum", _multiply_adds),
        **{name: (name, partial(_function, name)) for name in FUNCTIONS},
    }
)


def ways_of(case: VectorCase) -> Ways:
    """Return npusim's ways to compute an operation; for narrow formats also in float32, as frameworks do."""
    _, of = OPTIONS[case.operation]
    if case.fmt == "float32" or case.operation == "max":
        return of(case.out)

    def rounded(way: Callable[..., Array], *values: Array) -> Array:
        return cast(np.ascontiguousarray(way(*(np.asarray(widen(v), np.float32) for v in values))), case.out)

    return of(case.out) | {f"{name}, in float32": partial(rounded, way) for name, way in of("float32").items()}


def identify_operation(key: str, case: VectorCase, operands: tuple[Array, ...], result: Array) -> OperationResult:
    """Return which of npusim's ways to compute an operation explain all its results (bit patterns).

    NaN equals any NaN, except in casts, whose NaN rule is probed: in casts this holds only if no rule explains all
    results.  For maxima all zeros are equal.
    """
    f, asked = get_format(case.out), len(result)
    question = f"{OPTIONS[case.operation][0]}{' ' if case.operation == 'cast' else ', '}{case.out}"
    wanted = np.ascontiguousarray(result).view(f.dtype)
    of_wanted = np.asarray(widen(wanted))
    equal_of: dict[str, int] = {}
    but_nan: dict[str, int] = {}
    right: Array | None = None  # the first way that the format can express is correctly rounded
    for name, way in ways_of(case).items():
        try:
            with np.errstate(all="ignore"):
                got = np.ascontiguousarray(way(*operands))
        except FormatError:  # a policy that the format cannot express
            continue
        right, values = got if right is None else right, np.asarray(widen(got))
        equal = (got.view(f.bits_dtype) == result) | ((case.operation == "max") & (values == of_wanted))
        but_nan[name] = int((equal | (np.isnan(values) & np.isnan(of_wanted))).sum())
        equal_of[name] = int(equal.sum()) if case.operation == "cast" else but_nan[name]
    best, note = max(equal_of, key=lambda name: equal_of[name]), ""
    answers = tuple(name for name, n in equal_of.items() if n == asked)
    if not answers and (words := {n.partition(", NaN")[0] for n, count in but_nan.items() if count == asked}):
        return OperationResult(key, question, tuple(sorted(words)), asked, asked, note="NaN has separate bit patterns")
    if not answers:
        note = _row_order(case, operands[0], wanted) if case.operation == "sum" else _ulps(right, result)
    return OperationResult(key, question, answers, equal_of[best], asked, best, note)


def _row_order(case: VectorCase, rows: Array, sums: Array) -> str:
    """Return in words the tree of two-term additions that gives these sums; empty if there is none."""
    n = rows.shape[1]
    if n != COLUMNS[0]:
        return ""
    _, pairs, weights = row_probes(n, case.fmt)
    first, second = np.array(pairs).T
    lost = np.zeros((n, n))
    lost[first, second] = lost[second, first] = sum(weights) - np.asarray(widen(sums), np.float64) / LARGE[case.fmt][1]
    try:
        return in_words(swallowing_tree(list(range(n)), lost, weights))
    except ValueError:
        return "no order of additions in this format explains it: the sums may use a wider format"


def _ulps(right: Array | None, result: Array) -> str:
    """Return the numbers of results by their distance, in patterns, from the correctly rounded ones, the most frequent
    first.
    """
    assert right is not None
    usual = ~np.isnan(np.asarray(widen(right)))
    signed = f"i{right.itemsize}"
    apart = (result.view(signed).astype(np.int64) - right.view(signed))[usual]
    values, counts = np.unique(apart, return_counts=True)
    table = ", ".join(f"{values[n]:+d}: {counts[n] / usual.sum():.2%}" for n in np.argsort(-counts)[:5])
    return f"ulps from correctly rounded: {table}" + ("" if len(values) <= 5 else f", to {np.abs(values).max()}")
