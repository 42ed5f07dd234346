"""Finds the arithmetic of a matrix unit that explains every output: one question after another, each with separate
probes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import islice, product
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from npusim.formats import ARITHMETICS, cast, get_arithmetic, matmul
from npusim.formats.cast import Array, widen
from npusim.formats.mma_arithmetic import stated_name
from npusim.formats.mma_tree import ROUNDED, AdditionTree, C, Tree, compute, leaves_of, round_to
from npusim.studies.probe import trees
from npusim.studies.probe.files import decoded, encoded
from npusim.studies.probe.questions import BESIDE_C, LONG_K, QUESTIONS, RANDOM, TRIPLES, K, scale_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from npusim.formats.float_format import FloatFormat
    from npusim.studies.probe.questions import ProbeCase, Probes

#: Number of compared outputs in the tiles outside the diagonals, distributed over all these tiles.
MOST_OTHERS = 20_000
#: Number of equally good answers up to which each is compared with all outputs.
MOST_OPEN = 6
#: Ways in which an alignment may cut.
CUTS = ("toward_zero", "floor", "nearest_even")
#: Width of a fused step before it is known: wide enough for the values of the structure's probes.
SOME_FRACTION = 20
#: Fields of a unit that an answer changes.
Change = dict[str, Any]


def _of(name: str, **answers: object) -> dict[str, Change]:
    """Return answers in words, each with its value of one field."""
    return {words.replace("_", " "): {name: value} for words, value in answers.items()}


# Possible behaviours of a unit, by answer: the questions test one after another, and `_Unit._polish` tries all of them
# together.
ROUNDINGS: Mapping[str, Change] = MappingProxyType(
    {
        f"{mode}{'' if kept is None else f', {kept} bits kept'}": {"rounding": mode, "kept": kept}
        for kept in (None, 13, 10, 7)
        for mode in ROUNDED
    }
)
LATE: Mapping[str, Change] = MappingProxyType({mode: {"late": mode} for mode in ROUNDED})
FLUSHED = _of(
    "flush", **{"kept": "none", "operands are 0": "in", "results are 0": "out", "operands and results are 0": "both"}
)
EXPONENTS = _of(
    "exponents",
    **{"sum of the operands'": "stored", "the same, subnormals normalised": "normalised", "its own": "product"},
)
OVERFLOW = _of("overflow", **{"Inf": "inf", "the largest": "largest"})
LOWEST: Mapping[str, Change] = MappingProxyType(
    {str(n).lower(): {"lowest": n} for n in (None, *range(-145, -119), *range(-30, -9))}
)
INPUTS: dict[str, Change] = {"all": {"input_bits": None}} | {
    f"{bits} fraction bits, {mode}": {"input_bits": bits, "input_rounding": mode}
    for bits in (7, 8, 10, 11, 12)
    for mode in ("toward_zero", "nearest_even", "nearest_away")
}


def widths(fractions: range) -> dict[str, Change]:
    """Return the changes of an alignment to each of these numbers of fraction bits."""
    return {f"{f}, {cut}": {"fraction": f, "cut": cut} for f in fractions for cut in CUTS}


def products_in(tree: Tree) -> dict[str, Change]:
    """Return the ways in which products with more bits than the accumulator may enter exact additions."""
    plain = trees.bare(tree)
    rounded = trees.with_leaves(plain, lambda k: k if k == C else (k,))
    products = {
        "exact": plain,
        "rounded, then added": rounded,
        "exact, except that the first of a chain is rounded": trees.first_rounded(plain),
    }
    return {words: {"tree": t} for words, t in products.items() if t != plain or words == "exact"}


def kinds(tree: Tree, modes: Mapping[str, Change], *, more: bool = False) -> Iterator[Change]:
    """Yield the variants of a tree that a search tries: each rounding of ``modes``, and the roundings of sums of sums
    if there are any.

    ``more``: the result is instead the tree with each way in which products enter such sums, and the tree with flushed
    subnormals, each alone.
    """
    has_sums = trees.has_sums(trees.bare(tree))
    if not more:
        for mode in modes.values():
            yield from (
                {**mode, "late": late} for late in dict.fromkeys((mode["rounding"], *["nearest_even"] * has_sums))
            )
        return
    ways = [c for name, c in products_in(tree).items() if name != "rounded, then added"]
    yield from modes.values()
    yield from (late | way for late, way in product(LATE.values(), ways) if has_sums)
    yield from FLUSHED.values()


@dataclass(frozen=True)
class Answer:
    """The answer to one question: the number of its outputs, the number of outputs that the answer explains, and other
    answers that explain as many.
    """

    question: str
    answer: str
    explained: int
    asked: int
    open: tuple[str, ...] = ()


@dataclass(frozen=True)
class Identified:
    """The unit that explains a case's outputs.

    ``name`` is the name of a registered arithmetic, or states the unit's parameters; None if no unit explains every
    output. ``unit`` has one step, which includes c if c was given; sums are in format ``acc``, and ``out`` rounds the
    result. ``findings`` are faults of the outputs, or remarks on them.
    """

    case: ProbeCase
    name: str | None
    unit: AdditionTree | None
    acc: FloatFormat
    out: str
    answers: tuple[Answer, ...]
    registered: tuple[str, ...]
    explained: int
    asked: int
    findings: tuple[str, ...] = ()


def same(x: Array, y: Array) -> Array:
    """Return where values are equal: NaN equals NaN, and zeros of either sign are equal."""
    equal: Array = (x == y) | (np.isnan(x) & np.isnan(y))
    return equal


Operands = tuple[Array, Array, Array]


def predicted(unit: AdditionTree, case: ProbeCase, operands: Operands, acc: FloatFormat, out: str) -> Array:
    """Return a unit's result for rows of A, columns of B and values of C; ``out``: the rounding of the result."""
    fa, fb, _ = case.formats
    d = compute(unit, (fa, fb, acc), *operands)
    return d if acc.name == case.out.name else round_to(d, case.out, out)


def by_registry(name: str, case: ProbeCase, a: Array, b: Array, c: Array, side: int = 1) -> Array:
    """Return the result of a registered arithmetic's kernel for tiles of ``side`` rows, as float64 (n, side)."""
    u = get_arithmetic(name)
    # for single rows, the results are the diagonals
    many = side if side > 1 else next(t for t in (16, 8, 4, 2, 1) if len(a) % t == 0)
    x, y, z = (np.asarray(cast(v.astype(np.float32), f)) for v, f in ((a, u.a), (b, u.b), (c, u.acc)))
    tiles = len(a) // many
    right = np.ascontiguousarray(y.reshape(tiles, many, -1).swapaxes(1, 2))
    start = np.ascontiguousarray(np.broadcast_to(z.reshape(tiles, many, 1), (tiles, many, many)))
    d = matmul(x.reshape(tiles, many, -1), right, start, arithmetic=u)
    values = np.asarray(widen(np.ascontiguousarray(d)), np.float64).reshape(len(a), many)
    return values if side > 1 else values[np.arange(len(a)), np.arange(len(a)) % many][:, None]


@dataclass
class _Unit:
    """The decided parameters of the unit, and the outputs that decide them."""

    p: Probes
    d: Array
    acc: FloatFormat
    unit: AdditionTree = field(default_factory=AdditionTree)
    out: str = "nearest_even"
    answers: dict[str, Answer] = field(default_factory=dict)
    #: By question, the answers that explain equally many of its outputs.
    others: dict[str, dict[str, Change]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.everything = np.arange(len(self.d))
        # as `compute` reads them: all of one k together
        self.columns = tuple(np.ascontiguousarray(x.T) for x in (self.p.a, self.p.b))

    def equal(self, unit: AdditionTree, where: Array, out: str | None = None) -> Array:
        p = self.p
        a, b = self.columns if where is self.everything else (x.take(where, axis=1) for x in self.columns)
        operands = a.T, b.T, p.c[where]
        return same(predicted(unit, p.case, operands, self.acc, out or self.out), self.d[where])

    def score(self, unit: AdditionTree, where: Array) -> int:
        return int(self.equal(unit, where).sum())

    def answer(self, question: str, words: str, explained: int, asked: int, still: tuple[str, ...] = ()) -> None:
        self.answers[question] = Answer(question, words, explained, asked, still)

    def choose(self, question: str, where: Array, options: Mapping[str, Change]) -> None:
        """Choose the option that explains the most outputs; record the names of options that explain as many."""
        if not len(where):
            self.answer(question, "not asked", 0, 0)
            return
        scores = {name: self.score(replace(self.unit, **change), where) for name, change in options.items()}
        best = max(scores.values())
        winners = [name for name, n in scores.items() if n == best]
        # a decided answer is unchanged if it explains as many
        winners.sort(key=lambda name: replace(self.unit, **options[name]) != self.unit)
        self.unit = replace(self.unit, **options[winners[0]])
        self.others[question] = {name: options[name] for name in winners[1:]}
        self.answer(question, winners[0], best, len(where), tuple(winners[1:]))

    def settle_open(self, equal_of: Callable[[AdditionTree], Array]) -> Array:
        """Compare answers that explain equally many outputs of their question with all outputs; return the equal ones.

        The candidate that explains the most outputs is the answer; candidates that explain fewer are no longer open.
        """
        equal = equal_of(self.unit)
        for question, changes in self.others.items():
            if not 0 < len(changes) <= MOST_OPEN:
                continue
            best, still = self.answers[question].answer, list[str]()
            for name, change in changes.items():
                unit = replace(self.unit, **change)
                if (other := equal_of(unit)).sum() > equal.sum():
                    self.unit, equal, still, best = unit, other, [], name
                elif other.sum() == equal.sum():
                    still.append(name)
            self.answers[question] = replace(self.answers[question], answer=best, open=tuple(still))
        return equal

    # ------------------------------------------------------------ terms that are added together

    def structure(self) -> bool:
        """Determine the tree that explains the pairs; return whether the tree explains all of them. The tree is derived
        from the losses, is a plain chain, or is the result of a search.
        """
        where, best = self.p.of("structure"), (-1, AdditionTree())
        for tree, fraction in self._read_off(where):
            for rounding in ("nearest_even", "toward_zero"):
                unit = AdditionTree(tree, fraction, rounding=rounding)
                best = max(best, (self.score(unit, where), unit), key=lambda scored: scored[0])
            if best[0] == len(where):
                break
        how = "all terms of a step aligned" if best[1].fraction else "added exactly, then rounded"
        if best[0] < 0.98 * len(where):  # otherwise some outputs are wrong: they are reported
            best, how = self._search(where), "one of the known kinds"
        score, self.unit = best
        step = trees.step_of(self.unit.tree)
        if step is not None:
            self.unit = replace(self.unit, tree=trees.repeated(step, K))
        words = f"{trees.in_words(self.unit.tree)}; {how}"
        self.answer(
            "which terms meet", f"{'none explains all; nearest: ' * (score < len(where))}{words}", score, len(where)
        )
        return score == len(where)

    def _read_off(self, where: Array) -> Iterator[tuple[Tree, int | None]]:
        p = self.p
        (weights, unit), leaves = scale_of(p.case), [*range(K), *([C] if p.case.has_c else [])]
        lost = np.zeros((K + 1, K + 1))
        i, j = p.note[where, 0], p.note[where, 1]
        with np.errstate(invalid="ignore"):
            lost[i, j] = lost[j, i] = sum(weights[k] for k in leaves) - self.d[where] / unit
        for parse, fraction in ((trees.exact_tree, None), (trees.swallowing_tree, SOME_FRACTION)):
            try:
                yield parse(leaves, lost, weights), fraction
            except ValueError:
                continue
        for size in (1 << n for n in range(7)):
            for tree in (trees.chain(range(K), size), (C, trees.chain(range(K), size, None))):
                yield from ((tree, None), (tree, SOME_FRACTION))

    def _search(self, where: Array) -> tuple[int, AdditionTree]:
        """If sums are rounded in one direction (toward zero, odd), M and -M do not cancel: try known kinds of trees."""
        random = self.p.of("width", "random_normal", "random_wide")
        some = np.concatenate([where[:: max(1, len(where) // 30)], random[:: max(1, len(random) // 90)]])
        few, best, modes = some[::9], (-1, AdditionTree()), self._modes()
        for tree in trees.families(K):
            for change in kinds(tree, modes):
                unit = AdditionTree(tree, None, **change)
                if self.score(unit, few) >= len(few) // 2 and (score := self.score(unit, some)) > best[0]:
                    best = score, unit
            if best[0] == len(some):
                break
        return self.score(best[1], where), best[1]

    def _modes(self) -> dict[str, Change]:
        """Return the roundings that best explain 1 + r/8 of the last place, for each place separately."""
        p, flat = self.p, (tuple(range(K - 1)), K - 1)
        where = p.of("rounding")
        where = where[(p.note[where, 1] == 1) & (np.abs(p.note[where, 2]) < 8)]
        places = np.argmax(p.a[where] != 0, axis=1) + 100 * (p.a[where, 1] != 0)
        modes: dict[str, None] = {}
        for place in np.unique(places):
            part = where[places == place]
            scores = {
                name: self.score(AdditionTree(flat, late=str(change["rounding"]), **change), part)
                for name, change in ROUNDINGS.items()
            }
            modes |= {name: None for name, n in scores.items() if n == max(scores.values())}
        return {name: ROUNDINGS[name] for name in list(modes)[:6]}

    # ------------------------------------------------------------ behaviour of an addition

    def decide(self) -> None:
        """Answer the other questions twice, the second time each with the answers to the others."""
        for _ in range(2):
            for question in self._questions():
                self.choose(*question)
        while self._polish():
            before = self.unit, dict(self.answers), dict(self.others)
            for question in islice(self._questions(), 2, None):  # widths and operands are unchanged
                self.choose(*question)
            if self.score(self.unit, self.everything) <= self.score(before[0], self.everything):
                self.unit, self.answers, self.others = before
                break
        zeros, p = self.p.of("zero"), self.p
        n = int(np.signbit(self.d[zeros]).sum())
        words = f"-0 in {n} of {len(zeros)} sums of zeros" if n else "+0"
        self.answer("sign of zero", words, len(zeros), len(zeros))
        for kind, good, bad in (
            ("special", "as IEEE 754", "otherwise"),
            *((kind, "equal", "NOT equal") for kind in RANDOM),
        ):
            n, where = self.score(self.unit, p.of(kind)), p.of(kind)
            words = kind.replace("_", " ").replace("special", "Inf and NaN")
            self.answer(words, good if n == len(where) else bad, n, len(where))

    def _questions(self) -> Iterator[tuple[str, Array, Mapping[str, Change]]]:
        """Yield each question, the probes that answer it, and its answers, as far as the unit is determined by then."""
        of, is_exact = self.p.of, self.unit.fraction is None
        if len(where := of("output")):
            wide = self.unit if is_exact else replace(self.unit, fraction=24)
            scores = {mode: int(self.equal(wide, where, mode).sum()) for mode in ROUNDED}
            self.out = max(scores, key=lambda mode: scores[mode])
            self.answer("rounding on the way out", self.out, scores[self.out], len(where))
        yield "bits kept in a step", *self._widths()
        yield "operands as read", of("inputs"), INPUTS
        random = of("raw", *RANDOM)
        if is_exact:
            yield "products", random, products_in(self.unit.tree)
        else:
            yield "exponent of a product", random, EXPONENTS
        is_wide = self.acc.name == "float32"
        yield "rounding of a step", of("rounding"), {n: c for n, c in ROUNDINGS.items() if c["kept"] is None or is_wide}
        if trees.has_sums(self.unit.tree):
            yield "rounding of sums of sums", of("rounding_c", "random_normal", "random_wide"), LATE
        yield "subnormals", of("subnormal_in", "subnormal_out", "subnormal_c", "random_tiny"), FLUSHED
        if not is_exact:
            yield "least exponent aligned to", of("floor", "random_tiny", "subnormal_c", "subnormal_out"), LOWEST
        yield "overflow", of("overflow"), OVERFLOW

    def _widths(self) -> tuple[Array, dict[str, Change]]:
        """Return the probes where small terms vanish, and the alignments near the distance at which the last small term
        is visible.
        """
        p, tree, where = self.p, self.unit.tree, self.p.of("width", "width_c")
        if self.unit.fraction is None:
            return where, {"all": {"fraction": None}}
        asked = {"width": TRIPLES, **({} if trees.has_sums(tree) else {"width_c": [(C, *pair) for pair in BESIDE_C]})}
        parts = []
        for question, terms in asked.items():
            met = [at for at, t in enumerate(terms) if any(set(t) <= set(node) for node in trees.nodes(tree))]
            parts.append(p.of(question)[np.isin(p.note[p.of(question), 0], met)])
        where = np.sort(np.concatenate(parts))
        notes = p.note[where]
        last = int(max(notes[(self.d[where] != 0) & (notes[:, 2] > 0), 1], default=0))
        return where, widths(range(max(1, last - 3), last + 3))

    def _polish(self) -> bool:
        """Where some rows remain unexplained, try the answers to two questions together; return whether it helps."""
        equal = self.equal(self.unit, self.everything)
        if equal.all():
            return False
        lost = self.everything[~equal]
        some = np.union1d(lost[:: max(1, len(lost) // 100)], self.everything[:: len(equal) // 100])
        rounded = [*kinds(self.unit.tree, ROUNDINGS, more=True)]
        aligned = [
            {**width, **exponents, "kept": None}
            for width in ({"fraction": None}, *widths(range(8, 34)).values())
            for exponents in (EXPONENTS["sum of the operands'"], EXPONENTS["its own"])
        ]
        best = self.score(self.unit, some), self.unit
        neutral = replace(self.unit, rounding="nearest_even", late="nearest_even", kept=None, flush="none")
        for start, order in product((self.unit, neutral), ((*rounded, *aligned), (*aligned, *rounded))):
            here = self.score(start, some), start
            # the second time, each change is tried with the answers to the other questions
            for change in (*order, *order):
                if here[0] == len(some):
                    break
                unit = replace(here[1], **change)
                here = (n, unit) if (n := self.score(unit, some)) > here[0] else here
            best = max(best, here, key=lambda scored: scored[0])
        n = self.score(best[1], self.everything)
        if n > equal.sum():
            self.unit = best[1]
            self.answer("together", str(replace(self.unit, tree=(0,))).removeprefix("(0):"), n, len(self.d))
        return bool(n > equal.sum())


# ---------------------------------------------------------------- a case


def identify_product(p: Probes, d: Array, stated: str = "", instruction: str = "") -> Identified:
    """Return the unit that explains a case's outputs ``d`` (n, tile): each row's column, and other outputs of its tile.

    ``stated`` is the arithmetic in the device's file, ``instruction`` the device's matrix instruction, such as
    ``wgmma``: among registered units that explain all outputs, these two are preferred, the instruction first.
    """
    d, findings, is_product = _as_asked(p, d)
    if not is_product:
        return Identified(p.case, None, None, p.case.formats[2], "", (), (), 0, d.size, findings)
    diagonal = d[np.arange(len(d)), np.arange(len(d)) % d.shape[1]]
    tried: list[tuple[int, _Unit]] = []
    for acc in {f.name: f for f in (p.case.formats[2], p.case.out)}.values():
        unit = _Unit(p, diagonal, acc)
        is_whole = unit.structure()
        unit.decide()
        tried.append((unit.score(unit.unit, unit.everything), unit))
        if is_whole:
            break
    _, best = max(tried, key=lambda scored: scored[0])
    if best.acc.name != p.case.formats[2].name:
        findings = (*findings, f"it accumulates in {best.acc.name}")
    return _confirmed(best, p, d, findings, stated, instruction)


def _confirmed(
    best: _Unit, p: Probes, d: Array, findings: tuple[str, ...], stated: str, instruction: str
) -> Identified:
    """Compare the unit with every probe and other outputs of the tiles, and registered units with all outputs."""
    rows, columns = _looked_at(d)
    a, b = best.columns
    operands = a.take(rows, axis=1).T, b.take(rows // d.shape[1] * d.shape[1] + columns, axis=1).T, p.c[rows]
    wanted = d[rows, columns]

    def got(unit: AdditionTree) -> Array:
        return predicted(unit, p.case, operands, best.acc, best.out)

    equal = best.settle_open(lambda unit: same(got(unit), wanted))
    formats = (p.case.formats[0].name, p.case.formats[1].name, best.acc.name)
    registered, stem = _registered(formats, best, p, d), stated.partition(".")[0]
    prefix = f"{stem}.{instruction}."
    chosen = min(
        registered, key=lambda n: (not n.startswith(prefix), n != stated, not n.startswith(stem), len(n)), default=None
    )
    missed = int((~equal).sum())
    if chosen and missed:
        findings = (
            *findings,
            (f"the answers explain all but {missed:,} of {len(equal):,} outputs; {chosen} explains all of them"),
        )
    elif missed:
        first = int(np.flatnonzero(~equal)[0])
        row, column = int(rows[first]), int(columns[first])
        is_own = row % d.shape[1] == column
        asked = (
            f"{QUESTIONS[p.question[row]]} {tuple(p.note[row].tolist())}" if is_own else f"column {column} of its tile"
        )
        text = f"{missed:,} of {len(equal):,} outputs are unexplained; first: row {row}, {asked}"
        near = got(best.unit)[first].item()
        findings = (*findings, f"{text}: {wanted[first].item().hex()}, the nearest unit gives {near.hex()}")
    step = trees.step_of(best.unit.tree)
    if chosen is None and step is None:
        findings = (*findings, "C was not given: the addition of C is assumed to be last")
    unit = replace(best.unit, tree=trees.normal(best.unit.tree) if step is None else step)
    with_c = unit if C in leaves_of(unit.tree) else replace(unit, tree=(C, unit.tree))
    name = chosen or (None if missed else stated_name(*formats, with_c))
    counts = (d.size, d.size) if chosen else (len(equal) - missed, len(equal))
    return Identified(
        p.case, name, unit, best.acc, best.out, tuple(best.answers.values()), registered, *counts, findings
    )


def _registered(formats: tuple[str, ...], best: _Unit, p: Probes, d: Array) -> tuple[str, ...]:
    """Return the registered arithmetics that explain every output of every tile; equal ones are computed once."""
    known: dict[object, bool] = {}

    def explains(name: str, part: slice) -> bool:
        got = by_registry(name, p.case, p.a[part], p.b[part], p.c[part], d.shape[1])
        got = got if best.acc.name == p.case.out.name else round_to(got, p.case.out, best.out)
        return bool(same(got, d[part]).all())

    names = []
    for name, u in ARITHMETICS.items():
        if (u.a_format, u.b_format, u.acc_format) != formats or u.scale_block or p.case.depth % u.k:
            continue
        depth = u.k if u.index_groups or u.c_mode == "late" else 0
        block = 0 if u.method == "sequential" else u.block
        alike = replace(u, name="", k=depth, block=block, evidence="assumed", source="")
        if alike not in known:
            known[alike] = all(explains(name, part) for part in (slice(0, 256), slice(None)))
        if known[alike]:
            names.append(name)
    return tuple(names)


def _looked_at(d: Array) -> tuple[Array, Array]:
    """Return rows and columns of the diagonals of tiles, and of at most `MOST_OTHERS` other outputs, evenly spread."""
    side, rows, places = d.shape[1], np.arange(len(d)), np.arange(d.size)
    places = places[places // side % side != places % side]
    places = places[:: max(1, -(-len(places) // MOST_OTHERS))]
    return np.concatenate([rows, places // side]), np.concatenate([rows % side, places % side])


def _as_asked(p: Probes, d: Array) -> tuple[Array, tuple[str, ...], bool]:
    """Return D in the requested orientation, remarks on it, and whether D is a product of A, B and C at all.

    Random rows decide this, by results that are right within a 64th of their terms' size: swapped operands give D's
    transpose, or have each other's formats; C may be missing.
    """
    where, side = p.of("random_normal"), d.shape[1]
    tiles = np.unique(where // side)
    tiles = tiles[[np.isin(np.arange(t * side, (t + 1) * side), where).all() for t in tiles]] if side > 1 else where
    a, b, got = (x.reshape(len(x) // side, side, -1)[tiles] for x in (p.a, p.b, d))
    c = p.c.reshape(-1, side)[tiles][:, :, None]
    fa, fb, _ = p.case.formats
    size = np.abs(a) @ np.abs(b).swapaxes(1, 2) + np.abs(c)

    def fits(x: Array, y: Array, z: Array, result: Array) -> bool:
        return bool((np.abs(x @ y.swapaxes(1, 2) + z - result) <= size / 64).mean() > 0.99)

    if not len(tiles) or fits(a, b, c, got):
        return d, (), True
    if side > 1 and fits(a, b, c, got.swapaxes(1, 2)):
        turned = d.reshape(len(d) // side, side, side).swapaxes(1, 2).reshape(d.shape)
        return (
            turned,
            ("operands are swapped: D is the transpose of the product, and npusim reads it as the transpose",),
            True,
        )
    if p.case.has_c and fits(a, b, 0 * c, got):
        return (
            d,
            (f"D does not depend on C: add C to the product, or use a case without C ({p.case.name}.to_...)",),
            False,
        )
    if fa.name != fb.name:
        x, y = (decoded(encoded(z, f.name), g.name) for z, f, g in ((a, fa, fb), (b, fb, fa)))
        if fits(x, y, c, got):
            return d, ("the formats of A and B are swapped: each was read in the other one's format",), False
    return (
        d,
        ("D is not the expected product, not even in its leading bits: does the program order its tiles differently?",),
        False,
    )


def goes_on(one: Identified, p: Probes, d: Array) -> Answer:
    """Return how a product of four times the length continues: with further steps of the unit, or split along K by a
    library.
    """
    assert one.unit is not None
    diagonal = d[np.arange(len(d)), np.arange(len(d)) % d.shape[1]]
    scores = {}
    for name, tree in trees.continued(one.unit.tree, LONG_K).items():
        got = predicted(replace(one.unit, tree=tree), p.case, (p.a, p.b, p.c), one.acc, one.out)
        scores[name] = int(same(got, diagonal).sum())
    best = max(scores, key=lambda n: scores[n])
    others = tuple(n for n, s in scores.items() if s == scores[best] and n != best)
    words = best if scores[best] == len(diagonal) else "otherwise: a library cuts K in an unknown way"
    return Answer(f"products of K = {LONG_K}", words, scores[best], len(diagonal), others)
