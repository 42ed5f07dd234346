"""Probes of a vector core (row sums, maxima, functions, division, casts, multiply-adds), and what explains them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

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
    found = {}
    for f in ("float16", "float32"):
        for n in COLUMNS:
            found[f"sum.{f}@{n}"] = VectorCase("sum", f, (f"rows.{f}@{n}",), f)
        found[f"max.{f}"] = VectorCase("max", f, (f"nans.{f}",), f)
        inputs = f"all.{f}" if f == "float16" else f"x.{f}"
        for name in FUNCTIONS:
            found[f"{name}.{f}"] = VectorCase(name, f, (inputs,), f)
        found[f"div.{f}"] = VectorCase("div", f, (f"x.{f}", f"y.{f}"), f)
        found[f"fma.{f}"] = VectorCase("fma", f, (f"x.{f}", f"y.{f}", f"z.{f}"), f)
    for target in TARGETS:
        found[f"cast.{target}"] = VectorCase("cast", "float32", (f"ties.{target}",), target)
    return found


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
            arrays[f"{key}.{name}"] = np.asarray(cast((rng.standard_normal(SAMPLES) * 2.0**spread).astype(np.float32), f))
    for target in TARGETS:
        arrays[f"ties.{target}"] = tie_probes(target)
    return arrays


def row_probes(n: int, fmt: str) -> tuple[Array, list[tuple[int, int]], list[int]]:
    """Return rows whose sums say in which order they are added, the pairs of M and -M, and the weights elsewhere."""
    large, unit = (2.0**15, 2.0**-10) if fmt == "float16" else (2.0**60, 2.0**-10)
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
