"""Probes of a matrix unit: dot products with 64 and with 256 products; each probe answers one question.

M is the largest power of two that a format and its accumulator can represent, u the smallest product that a result can
show.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from npusim.errors import FormatError
from npusim.formats import cast, get_format
from npusim.formats.cast import widen
from npusim.formats.mma_arithmetic import formats_of_inputs, input_name
from npusim.formats.mma_tree import C

if TYPE_CHECKING:
    from collections.abc import Iterable

    from npusim.formats.cast import Array
    from npusim.formats.float_format import FloatFormat

#: Number of products of a probe: two steps of the deepest known unit; and of a probe that shows how a library splits K.
K, LONG_K = 64, 256
#: Probes are the diagonals of square tiles; their number is a multiple of the largest such tile.
TILE = 64
RANDOM = ("random_normal", "random_wide", "random_cancel", "random_tiny")
QUESTIONS = (
    *("structure", "width", "width_c", "raw", "inputs", "output", "rounding", "rounding_c", "subnormal_in"),
    *("subnormal_out", "floor", "subnormal_c", "zero", "overflow", "special", "split", *RANDOM),
)
#: Positions of three products in one step: two products are M and -M, and the third one is small.
TRIPLES = ((0, 1, 2), (0, 1, 4), (0, 2, 4), (0, 4, 8))
#: The same probe with M in C: it gives the positions of -M and of the small product, also for a step of two products.
BESIDE_C = ((1, 2), (1, 4), (0, 1))
#: Places below the last stored place of a sum, in eighths of that place: they decide its rounding.
EIGHTHS = (1, 2, 3, 4, 5, 6, 7, 9, 11, 12, 13)
#: Terms of a rounding probe: in a first step, in a step of interleaved chains, and in a last step.
PLACES = (tuple(range(10)), (0, 8, 16, 24, 32, 40, 48, 56, 1, 9), tuple(range(48, 58)))
#: Largest exponent of a probe.
FAR = 60
Terms = dict[int, tuple[float, float]]


@dataclass(frozen=True)
class ProbeCase:
    """One case of a unit: with ``f16.f32`` the probe provides C and the result is float32; with ``f16.f32.to_f16``
    there is no C and the result is float16.
    """

    name: str
    depth: int = K

    @property
    def formats(self) -> tuple[FloatFormat, FloatFormat, FloatFormat]:
        """Formats of A, of B, and of the accumulator."""
        inputs, acc, *_ = self.name.split(".")
        a, b = formats_of_inputs(inputs)
        return get_format(a), get_format(b), get_format(formats_of_inputs(acc)[0])

    @property
    def out(self) -> FloatFormat:
        """Format of D."""
        out = self.name.rpartition("to_")[2]
        return self.formats[2] if self.has_c else get_format(formats_of_inputs(out)[0])

    @property
    def has_c(self) -> bool:
        """Whether C is given."""
        return "to_" not in self.name

    @property
    def key(self) -> str:
        """The case's key in a file."""
        return self.name if self.depth == K else f"{self.name}@k{self.depth}"

    @classmethod
    def of(cls, key: str) -> ProbeCase:
        """Return the case of a key; raise `FormatError` if a format in the key is unknown."""
        name, _, depth = key.partition("@k")
        words = name.split(".")
        if len(words) not in (2, 3) or (len(words) == 3 and not words[2].startswith("to_")) or depth not in ("", "256"):
            raise FormatError(
                f"{key!r}: not a case; a case is INPUTS.ACCUMULATOR or INPUTS.ACCUMULATOR.to_RESULT, for example "
                "f16.f32"
            )
        case = cls(name, int(depth or K))
        if any(f.is_integer or f.bits < 8 or f.bits > 32 or f.table for f in (*case.formats, case.out)):
            raise FormatError(f"{key!r}: probes exist only for floating-point formats of 8 to 32 bits")
        return case


def case_name(a: str, b: str, acc: str, out: str | None = None) -> str:
    """Return the name of a case; ``out``: the format of its results if they have no C."""
    return f"{input_name(a, b)}.{input_name(acc, acc)}{f'.to_{input_name(out, out)}' if out else ''}"


@dataclass(frozen=True)
class Probes:
    """Dot products with their questions: values as float64, ``a`` and ``b`` (n, K), ``c`` (n,).

    ``question`` (n,): the place in `QUESTIONS`; ``note`` (n, 3): numbers that distinguish a question's probes.
    """

    case: ProbeCase
    a: Array
    b: Array
    c: Array
    question: Array
    note: Array

    def of(self, *names: str) -> Array:
        """Return the places of the probes of some questions."""
        return np.flatnonzero(np.isin(self.question, [QUESTIONS.index(n) for n in names]))


def holds(x: float, fmt: FloatFormat) -> bool:
    """Whether a value is exact in a format; NaN and Inf are."""
    if x == 0 or not math.isfinite(x):
        return True
    q = max(math.frexp(x)[1] - 1, fmt.min_exponent) - fmt.mantissa_bits
    return abs(x) <= fmt.max_finite and not math.ldexp(x, -q) % 1


@dataclass
class _Builder:
    """Collects the probes of a case, without probes whose operands a format cannot represent."""

    case: ProbeCase
    rows: list[tuple[str, tuple[int, ...], Terms, float]] = field(default_factory=list)
    dense: list[tuple[str, Array, Array, Array]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.fa, self.fb, self.acc = self.case.formats
        #: Whether the formats represent a pair of operands, cached because probes share most pairs.
        self._held: dict[tuple[float, float], bool] = {}
        self.is_seen = self.case.out.name != self.acc.name
        high, low = zip(*(self._range(f) for f in (self.fa, self.fb)), strict=True)
        self.highs, self.lows = high, low
        self.high = min(sum(high), _top(self.acc) - 1, 40)
        floor = -24 if "float16" in (self.acc.name, self.case.out.name) else -140
        self.low = max(sum(low), self.high - 75, floor)
        # An accumulator that represents the place of u would not lose u; if formats have few places, weights are small.
        self.is_narrow = self.high - self.low < 34 or self.case.out.mantissa_bits < 10

    @staticmethod
    def _range(f: FloatFormat) -> tuple[int, int]:
        return min(_top(f), FAR), max(f.min_exponent - (f.mantissa_bits if f.bits == 8 else 0), -FAR)

    def add(self, question: str, note: tuple[int, ...], terms: Terms, c: float = 0.0) -> None:
        fits = all(map(self._holds, terms.values())) and holds(c, self.acc)
        if fits and (self.case.has_c or (c == 0 and not question.endswith("_c"))):
            self.rows.append((question, note, terms, c))

    def _holds(self, pair: tuple[float, float]) -> bool:
        known = self._held.get(pair)
        if known is None:
            known = self._held[pair] = holds(pair[0], self.fa) and holds(pair[1], self.fb)
        return known

    def term(self, e: int, x: float = 1.0, y: float = 1.0) -> tuple[float, float]:
        """Return operands x 2**i and y 2**j with i + j = e, for integers x and y."""
        (ha, hb), (la, lb) = self.highs, self.lows
        ha, hb = ha - int(abs(x)).bit_length() + 1, hb - int(abs(y)).bit_length() + 1
        ea = min(max(e - e // 2, la), ha)
        eb = min(max(e - ea, lb), hb)
        return x * 2.0 ** (e - eb), y * 2.0**eb

    def weights(self) -> list[tuple[int, int, int]]:
        """Return, for each leaf, its weight and the weight's two factors; c is the last leaf.

        Weights within a step differ, and so do the sums of steps.
        """
        reach = [min((2 << f.mantissa_bits) - 1, 31) for f in (self.fa, self.fb)]
        factors: dict[int, tuple[int, int]] = {}
        for x in range(1, reach[0] + 1):
            for y in range(1, reach[1] + 1):
                factors.setdefault(x * y, (x, y))
        if self.is_narrow:
            return [(n, *factors[n]) for n in (1 + (k + k // 16) % 3 for k in range(K + 1))]
        listed = sorted(factors)[:24]
        return [(w, *factors[w]) for w in (*(listed[k % 16 + k // 16] for k in range(K)), listed[21])]

    def finished(self) -> Probes:
        """Return all probes; random probes fill the last tile."""
        depth = self.case.depth
        missing = -(len(self.rows) + sum(len(d[3]) for d in self.dense)) % TILE
        if missing:
            _random(self, "random_normal", missing, np.random.default_rng(missing))
        first = len(self.rows)
        a, b, c, note = np.zeros((first, depth)), np.zeros((first, depth)), np.zeros(first), np.zeros((first, 3))
        for i, (_, values, terms, start) in enumerate(self.rows):
            for k, (x, y) in terms.items():
                a[i, k], b[i, k] = x, y
            c[i], note[i, : len(values)] = start, values
        names = [row[0] for row in self.rows] + [name for name, *_, starts in self.dense for _ in starts]
        a, b, c = (np.concatenate([x, *(d[n] for d in self.dense)]) for n, x in ((1, a), (2, b), (3, c)))
        notes = np.concatenate([note, np.zeros((len(c) - first, 3))]).astype(np.int16)
        return Probes(self.case, a, b, c, np.array([QUESTIONS.index(q) for q in names], np.uint8), notes)


def scale_of(case: ProbeCase) -> tuple[list[int], float]:
    """Return two results for the `structure` probes of a case: the weights of its leaves, that of c last, and the unit
    u.
    """
    p = _Builder(case)
    return [w for w, _, _ in p.weights()], 2.0**p.low


def _top(f: FloatFormat) -> int:
    return math.frexp(f.max_finite)[1] - 1


def probes_of(case: ProbeCase, random: int = 800, seed: int = 7) -> Probes:
    """Return a case's probes, equal for equal ``seed``; ``random`` rows confirm the answers."""
    p = _Builder(case)
    rng = np.random.default_rng(seed)
    if case.depth == LONG_K:
        _split(p)
        _random(p, "random_normal", TILE, rng)
        return p.finished()
    _structure(p)
    _width(p)
    _inputs(p)
    _rounding(p)
    _subnormal(p)
    _special(p)
    for kind in RANDOM:
        _random(p, kind, random // len(RANDOM), rng)
    return p.finished()


def _structure(p: _Builder) -> None:
    """M and -M at every pair of leaves: the lost weights of the others show the node at which the two are added."""
    _pairs(p, "structure", combinations(range(K + p.case.has_c), 2), p.weights())


def _split(p: _Builder) -> None:
    """The same probes for some pairs, with four times as many products: they show how products follow one another."""
    leaves = LONG_K + p.case.has_c
    pairs = [(i, j) for i, step in ((0, 1), (100, 2)) for j in range(0, leaves, step) if i != j]
    is_light = p.case.out.mantissa_bits < 10
    weights = [1 if is_light else 1 + (k + k // 16) % 3 for k in range(LONG_K)]
    _pairs(p, "split", pairs, [(w, w, 1) for w in (*weights, 1)])


def _pairs(p: _Builder, question: str, pairs: Iterable[tuple[int, int]], weights: list[tuple[int, int, int]]) -> None:
    """Add probes with M at i, -M at j, and multiples of u elsewhere; ``weights``: one for each leaf, that of c last."""
    depth, (x, y) = p.case.depth, p.term(p.high)
    light = [p.term(p.low, *factors) for _, *factors in weights[:depth]]
    for i, j in pairs:
        terms, c = dict(enumerate(light)), weights[depth][0] * 2.0**p.low * p.case.has_c
        if j == depth:  # c is positive: a sum that is rounded toward zero leaves a positive M unchanged
            c, terms[i] = 2.0**p.high, (-x, y)
        else:
            terms[i], terms[j] = (x, y), (-x, y)
        p.add(question, (i, C if j == depth else j), terms, c)


def _width(p: _Builder) -> None:
    """Add M, -M and a small term in one step: this shows the distance at which the term is lost, and how it is cut."""
    hi, is_half = p.high, p.acc.name == "float16"
    for s in range(max(4, hi - 14 if p.is_seen and p.case.out.exponent_bits == 5 else 0), min(60, hi - p.low - 2) + 1):
        for x in (3, -3, 5):  # 1.5, -1.5 and 1.25 times 2**-s
            small = p.term(hi - s - (1 if abs(x) == 3 else 2), x)
            m, n = p.term(hi)
            for at, (i, j, k) in enumerate(TRIPLES):
                p.add("width", (at, s, x), {i: (m, n), j: (-m, n), k: small})
            for at, (j, k) in enumerate(BESIDE_C):
                p.add("width_c", (at, s, x), {j: (-m, n), k: small}, 2.0**hi)
        base = hi - 2 if is_half else hi
        m, n = p.term(base - 2, 3, 3)  # 2.25: its exponent is 1, its operands' 0
        if base - s - 1 >= p.low:
            for at, (i, j, k) in enumerate(TRIPLES[:3]):
                p.add("raw", (at, s), {i: (m, n), j: (-m, n), k: p.term(base - s - 1, 3)})


def _inputs(p: _Builder) -> None:
    """Add 1 + x 2**-s, minus 1, for each operand: this shows the bits of float32 operands that a switch to TF32 or HF32
    cuts.
    """
    if p.fa.name == p.fb.name == "float32":
        for s in range(3, 24):
            for x in (1, 3):
                long = 1 + x * 2.0**-s
                p.add("inputs", (0, s, x), {0: (long, 1.0), 1: (-1.0, 1.0)})
                p.add("inputs", (1, s, x), {0: (1.0, long), 1: (1.0, -1.0)})


def _rounding(p: _Builder) -> None:
    """Add sums whose bits below the last place of the result decide its rounding."""
    base = 8 if p.is_seen else min(p.high - 6, 0 if p.low <= -35 else 99)
    for r in EIGHTHS if p.is_seen else ():  # rounded again on output: exact in the accumulator
        bits = p.case.out.mantissa_bits
        for sign in (1, -1):
            low, high = p.term(-bits - 3, sign * (r & 3 or 4)), p.term(-bits - 1, sign * (r >> 2))
            p.add("output", (r, sign), {0: p.term(0, sign), 1: low, **({2: high} if r > 4 and r & 3 else {})})
    widths = {p.acc.mantissa_bits, 13, 10, p.case.out.mantissa_bits}
    for width in sorted((w for w in widths if w <= p.acc.mantissa_bits), reverse=True):
        for n in (1, 2, 4, 8):
            e = base - width - (3 if n == 1 else 0)
            for r in EIGHTHS:
                for sign in (1, -1):
                    for place in PLACES[: 1 if p.is_seen else None]:
                        terms = dict.fromkeys(place[:n], p.term(base, sign))
                        terms[place[n]] = p.term(e, sign * (r & 3 or 4))
                        if r > 4 and r & 3:
                            terms[place[n + 1]] = p.term(e + 2, sign * (r >> 2))
                        if p.is_seen:  # a later step cancels the leading bits, so that the last bits are visible
                            terms[K - 1] = p.term(base, -sign * n)
                        p.add("rounding", (width, n, sign * r), terms)
                        if n == 1:
                            rest = {k: t for k, t in terms.items() if k != place[0]}
                            p.add("rounding_c", (width, n, sign * r), rest, sign * 2.0**base)


def _split_power(e: int) -> tuple[float, float]:
    return 2.0 ** (e - e // 2), 2.0 ** (e // 2)


def _subnormal(p: _Builder) -> None:
    """Add subnormal operands, results and C, and terms that show the smallest exponent to which terms are aligned."""
    fa, fb, acc = p.fa, p.fb, p.acc
    for x in (1, 3):
        p.add("subnormal_in", (0, x), {0: (x * fa.min_subnormal, 2.0 ** min(_top(fb), 100))})
        p.add("subnormal_in", (1, x), {0: (2.0 ** min(_top(fa), 100), x * fb.min_subnormal)})
    e = acc.min_exponent - 3
    if fa.exponent_bits == 8 or acc.name == "float16":
        ea = max(e // 2, fa.min_exponent)
        p.add("subnormal_out", (), {0: (3 * 2.0**ea, 2.0 ** (e - ea))})
    last = acc.min_exponent - acc.mantissa_bits
    half = last - (acc.name == "float16")
    # the terms are half of the smallest result and a far smaller one, which is lost unless terms are aligned to such an
    # exponent
    for s in range(1, 45):
        for sign in (1, -1):
            small = _split_power(last - s - 1)
            p.add("floor", (s, sign), {0: _split_power(half), 1: (sign * small[0], small[1])})
    p.add("subnormal_c", (), {}, 3 * 2.0**e)
    p.add("zero", (1,), {0: (-1.0, 0.0)})
    if p.case.has_c:
        p.add("zero", (0,), {}, -0.0)


def _special(p: _Builder) -> None:
    """Add overflow, Inf and NaN in the first products and in C."""
    top = _top(p.acc)
    x, y = p.term(min(p.high, top - 1))
    for sign in (1, -1):
        for n in (1, 3):
            p.add("overflow", (0, sign, n), dict.fromkeys(range(n), (sign * x, y)), sign * p.acc.max_finite)
        if p.fa.exponent_bits == 8 or p.acc.name == "float16":
            one = 2.0 ** (top // 2 + 1)
            p.add("overflow", (1, sign), {0: (sign * one, one)})
            p.add("overflow", (2, sign), {0: (sign * one, one), 1: (-sign * one, one)})
    for at, value in enumerate((np.inf, -np.inf, np.nan)):
        if p.fa.nan != "none" if np.isnan(value) else p.fa.has_infinity:
            p.add("special", (at, 0), {0: (value, 1.0)})
            p.add("special", (at, 1), {0: (value, 0.0)})
            p.add("special", (at, 2), {0: (value, 1.0), 1: (-value, 1.0)})
        if p.case.has_c:
            p.add("special", (at, 3), {0: (1.0, 1.0)}, value)


def _random(p: _Builder, kind: str, count: int, rng: np.random.Generator) -> None:
    """Add dense random rows: normal ones, and ones with many magnitudes, with terms that cancel, and with tiny
    terms.
    """

    def values(shape: tuple[int, ...], f: FloatFormat) -> Array:
        x = rng.standard_normal(shape)
        half = min(_top(f) - 1, 14)
        e = rng.integers(-half, half // 2, shape)
        if kind == "random_wide":
            x = x * 2.0**e
        elif kind == "random_tiny":
            is_wide = f.exponent_bits == 8
            x = x * (2.0 ** rng.integers(-66, -60, shape) if is_wide else 2.0 ** (f.min_exponent // 2 + e // 2))
        return exact(x, f)

    depth = p.case.depth
    a, b, c = values((count, depth), p.fa), values((count, depth), p.fb), np.zeros(count)
    if kind == "random_cancel":
        a[:, 1::2], b[:, 1::2] = -a[:, ::2], b[:, ::2]
        b[:, 3] = values((count,), p.fb)
    if p.case.has_c:
        is_tiny = kind == "random_tiny"
        size = (2.0**-120 if p.fa.exponent_bits == 8 else 2.0**-18) if is_tiny else 1.0
        c = exact(rng.standard_normal(count) * size, p.acc)
    p.dense.append((kind, a, b, c))


def exact(x: Array, f: FloatFormat) -> Array:
    """Return values rounded to a format, as float64."""
    return np.asarray(widen(cast(x.astype(np.float32), f, overflow="saturate")), np.float64)
