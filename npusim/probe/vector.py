"""Probes of a vector core (row sums, maxima, functions, division, casts, multiply-adds), and what explains them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from npusim.errors import FormatError
from npusim.formats import cast, get_format, reduce_sum, unary
from npusim.formats.cast import NAN_RULES, OVERFLOWS, widen
from npusim.formats.elementwise import add, div, fma, mul
from npusim.formats.mma_tree import ROUNDED
from npusim.formats.reductions import ORDERS

if TYPE_CHECKING:
    from npusim.formats.cast import Array

#: Columns of the rows that are summed: all pairs of the first, some pairs of the others.
COLUMNS = (64, 100, 128, 256)
#: First columns of the pairs that are asked where not all are.
FIRST = (0, 1, 5, 77)
SAMPLES = 8192
FUNCTIONS = ("exp", "exp2", "rsqrt", "tanh")
#: M of rows that are summed, and what its weights are multiples of: lost beside M in float32 too.
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
    """Return the operations that are asked, by key."""
    cases_by_key = {}
    for f in ("float16", "float32"):
        for n in COLUMNS:
            cases_by_key[f"sum.{f}@{n}"] = VectorCase("sum", f, (f"rows.{f}@{n}",), f)
        cases_by_key[f"max.{f}"] = VectorCase("max", f, (f"nans.{f}",), f)
        domain = f"all.{f}" if f == "float16" else f"x.{f}"
        for name in FUNCTIONS:
            cases_by_key[f"{name}.{f}"] = VectorCase(name, f, (domain,), f)
        cases_by_key[f"div.{f}"] = VectorCase("div", f, (f"x.{f}", f"y.{f}"), f)
        cases_by_key[f"fma.{f}"] = VectorCase("fma", f, (f"x.{f}", f"y.{f}", f"z.{f}"), f)
    for target in TARGETS:
        cases_by_key[f"cast.{target}"] = VectorCase("cast", "float32", (f"ties.{target}",), target)
    return cases_by_key


def inputs(seed: int = 7) -> dict[str, Array]:
    """Return the inputs of `cases` by key, in their formats' dtypes."""
    rng = np.random.default_rng(seed)
    arrays: dict[str, Array] = {}
    arrays["all.float16"] = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    for name in ("float16", "float32"):
        f = get_format(name)
        for n in COLUMNS:
            arrays[f"rows.{name}@{n}"] = row_probes(n, name)[0]
        nans = [np.nan, 1.0, -0.0, 0.0, -np.inf, np.inf]
        pairs = np.array([(x, y) for x in nans for y in nans])
        arrays[f"nans.{name}"] = np.concatenate([pairs, np.full((len(pairs), 62), -3.0)], 1).astype(f.dtype)
        for key in ("x", "y", "z"):
            spread = rng.uniform(-4, 4, SAMPLES) * (rng.random(SAMPLES) < 0.7)
            arrays[f"{key}.{name}"] = np.asarray(
                cast((rng.standard_normal(SAMPLES) * 2.0**spread).astype(np.float32), f)
            )
    for target in TARGETS:
        arrays[f"ties.{target}"] = tie_probes(target)
    return arrays


def row_probes(n: int, fmt: str) -> tuple[Array, list[tuple[int, int]], list[int]]:
    """Return rows whose sums say in which order they are added, the pairs of M and -M, and the weights elsewhere."""
    large, unit = LARGE[fmt]
    weights = [1 + (k % 16 + k // 16) % 23 for k in range(n)]
    pairs = [(i, j) for i, j in combinations(range(n), 2) if n == COLUMNS[0] or i in FIRST]
    x = np.tile(np.array(weights) * unit, (len(pairs), 1))
    for row, (i, j) in enumerate(pairs):
        x[row, i], x[row, j] = large, -large
    return np.asarray(cast(x.astype(np.float32), fmt)), pairs, weights


def tie_probes(target: str) -> Array:
    """Return float32 at the midpoints of a format's neighbours, one ulp to each side, at its edges, Inf and NaN."""
    f = get_format(target)
    codes = np.arange(f.max_code, dtype=f.bits_dtype)
    if len(codes) > 1 << 12:  # of a 16-bit format every 53rd, and the subnormals' and the largest
        codes = np.unique(np.concatenate([codes[::53], codes[1:64], codes[-64:]]))
    low = widen(codes.view(f.dtype)).astype(np.float64)
    high = widen((codes + np.ones_like(codes)).view(f.dtype)).astype(np.float64)
    middle = ((low + high) / 2).astype(np.float32)
    last = f.max_finite - float(low[-1])
    outside = [f.max_finite, f.max_finite + last / 2, f.max_finite + last, f.max_finite * 2, 3e38]
    edges = np.minimum(outside, np.finfo(np.float32).max).astype(np.float32)
    some = np.concatenate([middle, edges])
    some = np.concatenate([some, np.nextafter(some, np.float32(0)), np.nextafter(some, np.float32(3e38))])
    special = np.array([0x7F800000, 0x7FC00000, 0x7F800001, 0x7FFFFFFF, 0x7FC02000, 0], np.uint32).view(np.float32)
    some = np.concatenate([some, special])
    return np.concatenate([some, -some])


# ---------------------------------------------------------------- what explains the results


@dataclass(frozen=True)
class OperationResult:
    """What explains an operation's results: ``answers`` that all of them have, ``explained`` of ``asked``, and why not.

    ``answers`` is empty where nothing explains all; ``best`` is what explains most, ``note`` what else is to say.
    """

    key: str
    question: str
    answers: tuple[str, ...]
    explained: int
    asked: int
    best: str = ""
    note: str = ""


def _orders() -> Iterator[str]:
    yield from ORDERS
    for neighbours in (1, 2, 4, 8):
        for lanes in (1, 2, 4, 8, 16, 32):
            for warps in (1, 2, 4, 8):
                yield f"lanes_{neighbours}x{lanes}x{warps}"


def _wide(x: Array, order: str, fmt: str) -> Array:
    """Sums in float32 of a narrower format, rounded once."""
    return np.asarray(cast(reduce_sum(np.asarray(widen(x), np.float32), "float32", order), fmt))


def _sums(case: VectorCase) -> Iterator[tuple[str, Callable[..., Array]]]:
    for order in _orders():
        yield order, lambda x, order=order: reduce_sum(x, case.fmt, order)
    if case.fmt != "float32":
        for order in _orders():
            yield f"{order}, in float32", lambda x, order=order: _wide(x, order, case.fmt)


def _maxima(case: VectorCase) -> Iterator[tuple[str, Callable[..., Array]]]:
    f = get_format(case.fmt)

    def largest(x: Array, take: Callable[..., Array], zero: str) -> Array:
        wide = np.asarray(widen(x), np.float64)
        best, is_zero = take(wide, axis=-1), wide == 0
        at = is_zero.argmax(axis=-1) if zero == "first" else wide.shape[-1] - 1 - is_zero[:, ::-1].argmax(axis=-1)
        signs = np.signbit(wide[np.arange(len(wide)), at])
        if zero in "+-":
            has = is_zero & (np.signbit(wide) == (zero == "-"))
            signs = has.any(axis=-1) == (zero == "-")
        return np.asarray(cast(np.where(best == 0, np.where(signs, -0.0, 0.0), best).astype(np.float32), f))

    for take, nan in ((np.fmax.reduce, "numbers win over NaN"), (np.max, "a NaN makes NaN")):
        for zero, words in (
            ("+", "+0 over -0"),
            ("-", "-0 over +0"),
            ("first", "of zeros the first"),
            ("last", "of zeros the last"),
        ):
            yield f"{nan}, {words}", lambda x, t=take, z=zero: largest(x, t, z)


def _functions(case: VectorCase) -> Iterator[tuple[str, Callable[..., Array]]]:
    function = getattr(unary, case.operation)
    for name, variant in unary.VARIANTS[case.operation].items():
        if case.fmt in variant.formats:
            yield name, lambda x, name=name: function(x, case.fmt, variant=name)
    if case.fmt != "float32":  # as frameworks compute narrow formats
        for name, variant in unary.VARIANTS[case.operation].items():
            if "float32" in variant.formats:
                yield (
                    f"{name} in float32, rounded",
                    lambda x, name=name: cast(
                        function(np.asarray(widen(x), np.float32), "float32", variant=name), case.fmt
                    ),
                )


def _casts(case: VectorCase) -> Iterator[tuple[str, Callable[..., Array]]]:
    for rounding in ROUNDED:
        for overflow in OVERFLOWS:
            for nan in NAN_RULES:
                yield (
                    f"{rounding}, overflow {overflow}, NaN {nan}",
                    lambda x, r=rounding, o=overflow, n=nan: cast(x, case.out, rounding=r, overflow=o, nan=n),
                )


def _arithmetic(case: VectorCase) -> Iterator[tuple[str, Callable[..., Array]]]:
    f = case.fmt
    if case.operation == "div":
        yield "correctly rounded", lambda x, y: div(x, y, f)
        yield "times the correctly rounded reciprocal", lambda x, y: mul(x, unary.rcp(y, f), f)
    else:
        yield "one rounding", lambda x, y, z: fma(x, y, z, f)
        yield "two roundings", lambda x, y, z: add(mul(x, y, f), z, f)
    if f != "float32":

        def wide(*values: Array) -> Array:
            x, y, *z = (np.asarray(widen(v), np.float32) for v in values)
            return cast(div(x, y, "float32") if not z else fma(x, y, z[0], "float32"), f)

        yield "in float32, rounded once more", wide


OPTIONS: Mapping[str, tuple[str, Callable[[VectorCase], Iterator[tuple[str, Callable[..., Array]]]]]] = (
    MappingProxyType(
        {
            "sum": ("order of a row's sum", _sums),
            "max": ("maximum of a row", _maxima),
            "cast": ("cast from float32", _casts),
            "div": ("division", _arithmetic),
            "fma": ("product and sum", _arithmetic),
            **{name: (f"{name}", _functions) for name in FUNCTIONS},
        }
    )
)


def identify_operation(key: str, case: VectorCase, operands: tuple[Array, ...], result: Array) -> OperationResult:
    """Return which of npusim's ways to compute an operation explain all its results (bit patterns).

    NaN equals any NaN, but in casts, whose NaN rule is asked for: there only where no rule explains all.
    """
    question, ways = OPTIONS[case.operation]
    question = f"{question}, {case.fmt}" if case.operation != "cast" else f"{question} to {case.out}"
    f = get_format(case.out)
    wanted = np.ascontiguousarray(result).view(f.dtype)
    is_nan = np.isnan(np.asarray(widen(wanted)))
    equal_of: dict[str, int] = {}
    but_nan: dict[str, int] = {}
    for name, compute in ways(case):
        try:
            with np.errstate(all="ignore"):
                got = np.ascontiguousarray(compute(*operands))
        except FormatError:  # a policy that the format cannot express
            continue
        equal = got.view(f.bits_dtype) == result
        either = equal | (np.isnan(np.asarray(widen(got))) & is_nan)
        but_nan[name] = int(either.sum())
        equal_of[name] = int(equal.sum()) if case.operation == "cast" else but_nan[name]
    answers, note = tuple(name for name, n in equal_of.items() if n == len(result)), ""
    if not answers and (words := {n.partition(", NaN")[0] for n, count in but_nan.items() if count == len(result)}):
        return OperationResult(
            key, question, tuple(sorted(words)), len(result), len(result), note="NaN has patterns of its own"
        )
    best = max(equal_of, key=lambda name: equal_of[name])
    if not answers:
        note = _row_order(case, operands[0], wanted) if case.operation == "sum" else _ulps(case, operands, result)
    return OperationResult(key, question, answers, equal_of[best], len(result), best, note)


def _row_order(case: VectorCase, rows: Array, sums: Array) -> str:
    """Return in words the tree of additions of two terms that gives these sums; empty where there is none."""
    from npusim.probe.trees import in_words, swallowing_tree

    n = rows.shape[1]
    _, pairs, weights = row_probes(n, case.fmt)
    if n != COLUMNS[0]:
        return ""
    lost = np.zeros((n, n))
    values = np.asarray(widen(sums), np.float64)
    for (i, j), total in zip(pairs, values, strict=True):
        lost[i, j] = lost[j, i] = sum(weights) - total / LARGE[case.fmt][1]
    try:
        return in_words(swallowing_tree(list(range(n)), lost, weights))
    except ValueError:
        return "no order of additions in this format: perhaps a wider one"


def _ulps(case: VectorCase, operands: tuple[Array, ...], result: Array) -> str:
    """Return how many results are how many patterns from the correctly rounded ones, the commonest first."""
    f = get_format(case.out)
    _, ways = OPTIONS[case.operation]
    with np.errstate(all="ignore"):
        right = np.ascontiguousarray(next(iter(ways(case)))[1](*operands))
    usual = ~np.isnan(np.asarray(widen(right)))
    signed = np.dtype(f"i{f.size_bytes}")
    apart = result.view(signed).astype(np.int64)[usual] - right.view(signed)[usual]
    values, counts = np.unique(apart, return_counts=True)
    order = np.argsort(-counts)[:5]
    table = ", ".join(f"{int(values[n]):+d}: {counts[n] / usual.sum():.2%}" for n in order)
    return f"ulps from correctly rounded: {table}" + ("" if len(values) <= 5 else f", to {int(np.abs(values).max())}")
