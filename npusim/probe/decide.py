"""Which arithmetic of a matrix unit explains every output: one decision after the other, each from its own probes."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from npusim.formats import ARITHMETICS, cast, get_arithmetic, matmul
from npusim.formats.cast import Array, widen
from npusim.formats.mma_arithmetic import stated_name
from npusim.formats.mma_tree import ROUNDED, AdditionTree, C, Tree, chain, compute, leaves_of, round_to
from npusim.probe import trees
from npusim.probe.files import decoded, encoded
from npusim.probe.questions import LONG_K, QUESTIONS, RANDOM, TRIPLES, K, scale_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from npusim.formats.float_format import FloatFormat
    from npusim.probe.questions import ProbeCase, Probes

#: Other outputs of the tiles than their diagonals that are looked at, spread over all of them.
MOST_OTHERS = 20_000
#: Answers that explain as many, up to which each is held to all outputs.
MOST_OPEN = 6
#: Roundings that are tried, the commonest first.
MODES = tuple(ROUNDED)
#: How an alignment may cut.
CUTS = ("toward_zero", "floor", "nearest_even")
#: Fraction bits that a result may be cut to, and operands.
KEPT, INPUT_BITS = (None, 13, 10, 7), (None, 7, 8, 10, 11, 12)
#: Of a fused step, before its width is known: enough to swallow what the structure's probes have.
SOME_FRACTION = 20


@dataclass(frozen=True)
class Answer:
    """One question's answer: of how many outputs it explains how many, and which others explain as many."""

    question: str
    answer: str
    explained: int
    asked: int
    open: tuple[str, ...] = ()


@dataclass(frozen=True)
class Identified:
    """What explains a case's outputs.

    ``name`` is a registered arithmetic's, else says the unit's parameters; None where no unit explains every output.
    ``unit`` has one step, c in it where c was given; it adds up in ``acc``, and ``out`` rounds what leaves it.
    ``findings`` say what is wrong, or worth knowing, of the outputs.
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
    """Return where values are equal: NaN to NaN, zeros of either sign."""
    equal: Array = (x == y) | (np.isnan(x) & np.isnan(y))
    return equal


Operands = tuple[Array, Array, Array]


def predicted(unit: AdditionTree, case: ProbeCase, operands: Operands, acc: FloatFormat, out: str) -> Array:
    """Return what leaves a unit for rows of A, columns of B and values of C; ``out``: the rounding on the way."""
    fa, fb, _ = case.formats
    d = compute(unit, (fa, fb, acc), *operands)
    return d if acc.name == case.out.name else round_to(d, case.out, out)


def by_registry(name: str, case: ProbeCase, a: Array, b: Array, c: Array, side: int = 1) -> Array:
    """Return what a registered arithmetic's kernel computes of tiles of ``side`` rows, as float64 (n, side)."""
    u = get_arithmetic(name)
    many = side if side > 1 else next(t for t in (16, 8, 4, 2, 1) if len(a) % t == 0)  # of single rows the diagonals
    x, y, z = (np.asarray(cast(v.astype(np.float32), f)) for v, f in ((a, u.a), (b, u.b), (c, u.acc)))
    tiles = len(a) // many
    right = np.ascontiguousarray(y.reshape(tiles, many, -1).swapaxes(1, 2))
    start = np.ascontiguousarray(np.broadcast_to(z.reshape(tiles, many, 1), (tiles, many, many)))
    d = matmul(x.reshape(tiles, many, -1), right, start, arithmetic=u)
    values = np.asarray(widen(np.ascontiguousarray(d)), np.float64).reshape(len(a), many)
    return values if side > 1 else values[np.arange(len(a)), np.arange(len(a)) % many][:, None]


@dataclass
class _Unit:
    """The unit as far as it is decided, and the outputs that decide."""

    p: Probes
    d: Array
    acc: FloatFormat
    unit: AdditionTree = field(default_factory=AdditionTree)
    out: str = "nearest_even"
    answers: list[Answer] = field(default_factory=list)
    #: By question the fields that another answer, which explains as many of its outputs, would change.
    others: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)

    def got(self, unit: AdditionTree, where: Array, out: str | None = None) -> Array:
        p = self.p
        return predicted(unit, p.case, (p.a[where], p.b[where], p.c[where]), self.acc, out or self.out)

    def score(self, unit: AdditionTree, where: Array) -> int:
        return int(same(self.got(unit, where), self.d[where]).sum())

    def choose(self, question: str, where: Array, options: Mapping[str, AdditionTree]) -> None:
        """Decide for the option that explains most of the outputs; name those that explain as many."""
        if not len(where):
            self.answers.append(Answer(question, "not asked", 0, 0))
            return
        scores = {name: self.score(u, where) for name, u in options.items()}
        best = max(scores.values())
        winners = [name for name, n in scores.items() if n == best]
        winners.sort(key=lambda name: options[name] != self.unit)  # what is decided stays, where it explains as many
        self.unit = options[winners[0]]
        self.others[question] = {
            name: {
                f.name: v
                for f in fields(AdditionTree)
                if (v := getattr(options[name], f.name)) != getattr(self.unit, f.name)
            }
            for name in winners[1:]
        }
        self.answers.append(Answer(question, winners[0], best, len(where), tuple(winners[1:])))

    def settle_open(self, equal_of: Callable[[AdditionTree], Array]) -> Array:
        """Hold answers that explain as many outputs of their question to all outputs; return which are equal.

        The one that explains more is the answer, one that explains fewer is no longer open.
        """
        equal = equal_of(self.unit)
        for at, answer in enumerate(self.answers):
            changes = self.others.get(answer.question, {})
            if not answer.open or len(changes) > MOST_OPEN or answer.question == "together":
                continue
            best, still = answer.answer, list[str]()
            for name in answer.open:
                unit = replace(self.unit, **changes.get(name, {}))
                if (other := equal_of(unit)).sum() > equal.sum():
                    self.unit, equal, still, best = unit, other, [], name
                elif other.sum() == equal.sum():
                    still.append(name)
            self.answers[at] = replace(answer, answer=best, open=tuple(still))
        return equal

    # ------------------------------------------------------------ which terms meet

    def structure(self) -> bool:
        """Read the tree off the pairs; return whether one explains all of them."""
        p, where = self.p, self.p.of("structure")
        (weights, unit), leaves = scale_of(p.case), [*range(K), *([C] if p.case.has_c else [])]
        total, lost = sum(weights[k] for k in leaves), np.zeros((K + 1, K + 1))
        i, j = p.note[where, 0], p.note[where, 1]
        with np.errstate(invalid="ignore"):
            lost[i, j] = lost[j, i] = total - self.d[where] / unit
        for parse, fraction in ((trees.exact_tree, None), (trees.swallowing_tree, SOME_FRACTION)):
            try:
                tree = parse(leaves, lost, weights)
            except ValueError:
                continue
            if self._explains(tree, fraction, where) == len(where):
                self._settle(tree, fraction, len(where), len(where))
                return True
        guesses = [chain(K, 1 << n, is_late=is_late) for n in range(7) for is_late in (False, True)]
        scores = [
            (self._explains(t, fraction, where), t, fraction) for t in guesses for fraction in (None, SOME_FRACTION)
        ]
        score, tree, fraction = max(scores, key=lambda g: g[0])
        if score < 0.98 * len(where):
            return self._search(where)
        self._settle(tree, fraction, score, len(where))  # some outputs are wrong: they are reported
        return False

    def _search(self, where: Array) -> bool:
        """Where sums are rounded one way (toward zero, odd), M and -M do not cancel: try known kinds of trees."""
        random = self.p.of("width", "random_normal", "random_wide")
        some = np.concatenate([where[:: max(1, len(where) // 30)], random[:: max(1, len(random) // 90)]])
        few, best = some[::9], (-1, AdditionTree(chain(K, 1)))
        modes = self._modes()
        for tree in trees.families(K):
            has_sums = _has_sums(tree)
            for mode, kept in modes:
                for late in {mode: None, "nearest_even": None} if has_sums else (mode,):
                    unit = AdditionTree(tree, None, rounding=mode, kept=kept, late=late)
                    if self.score(unit, few) < len(few) // 2:
                        continue
                    score = self.score(unit, some)
                    best = (score, unit) if score > best[0] else best
            if best[0] == len(some):
                break
        self.unit, score = best[1], self.score(best[1], where)
        words = trees.in_words(self.unit.tree)
        words = f"{words}; found among known kinds" if score == len(where) else f"none explains all; nearest: {words}"
        self.answers.append(Answer("which terms meet", words, score, len(where)))
        return score == len(where)

    def _modes(self) -> list[tuple[str, int | None]]:
        """Return the roundings, and bits kept, that explain 1 + r/8 of the last place best, at each place apart."""
        p, flat = self.p, (tuple(range(K - 1)), K - 1)
        where = p.of("rounding")
        where = where[(p.note[where, 1] == 1) & (np.abs(p.note[where, 2]) < 8)]
        found: dict[tuple[str, int | None], None] = {}
        for first in np.unique(np.argmax(p.a[where] != 0, axis=1) + 100 * (p.a[where, 1] != 0)):
            part = where[np.argmax(p.a[where] != 0, axis=1) + 100 * (p.a[where, 1] != 0) == first]
            scores = {
                (mode, kept): self.score(AdditionTree(flat, rounding=mode, kept=kept, late=mode), part)
                for kept in KEPT
                for mode in MODES
            }
            found |= {name: None for name, n in scores.items() if n == max(scores.values())}
        return list(found)[:6]

    def _explains(self, tree: Tree, fraction: int | None, where: Array) -> int:
        found = 0
        for rounding in ("nearest_even", "toward_zero"):
            self.unit = AdditionTree(tree, fraction, rounding=rounding)
            found = max(found, self.score(self.unit, where))
        return found

    def _settle(self, tree: Tree, fraction: int | None, score: int, asked: int) -> None:
        step = trees.step_of(tree)
        whole = tree if step is None else trees.repeated(step, K)
        self.unit = AdditionTree(whole, fraction, rounding="toward_zero" if fraction else "nearest_even")
        how = "all terms of a step aligned" if fraction else "added exactly, then rounded"
        words = trees.in_words(whole) if score == asked else f"none explains all; nearest: {trees.in_words(whole)}"
        self.answers.append(Answer("which terms meet", f"{words}; {how}", score, asked))

    # ------------------------------------------------------------ what an addition does

    def decide(self) -> None:
        """Answer the other questions, twice: the second time each with what the others settled."""
        first = list(self.answers)
        for _ in range(2):
            self.answers = list(first)
            self._outward()
            self._width()
            self._inputs()
            self._products()
            self._rounding()
            self._range()
        everything = np.arange(len(self.d))
        for _ in range(3):
            if not self._polish():
                break
            before = self.unit, list(self.answers)
            self._products()
            self._rounding()
            self._range()
            if self.score(self.unit, everything) < self.score(before[0], everything):
                self.unit, self.answers = before
            self.answers = list({answer.question: answer for answer in self.answers}.values())  # the last of each
        for kind in RANDOM:
            where = self.p.of(kind)
            n = self.score(self.unit, where)
            self.answers.append(
                Answer(kind.replace("_", " "), "equal" if n == len(where) else "NOT equal", n, len(where))
            )

    def _polish(self) -> bool:
        """Where some rows stay unexplained, try what the questions ask one by one together; return whether it helps."""
        everything = np.arange(len(self.d))
        score = self.score(self.unit, everything)
        if score == len(self.d):
            return False
        lost = everything[~same(self.got(self.unit, everything), self.d)]
        some = np.union1d(lost[:: max(1, len(lost) // 100)], everything[:: len(everything) // 100])
        bare = trees.bare(self.unit.tree)
        rounded: list[dict[str, Any]] = [{"rounding": mode, "kept": kept} for mode in MODES for kept in KEPT]
        if _has_sums(bare):
            rounded += [{"late": m, "tree": t} for m in MODES for t in (bare, _first_rounded(bare))]
        rounded += [{"flush": flush} for flush in ("none", "in", "out", "both")]
        aligned: list[dict[str, Any]] = [
            {"fraction": f, "cut": cut, "exponents": e, "kept": None}
            for f in (None, *range(8, 34))
            for cut in (CUTS if f else CUTS[:1])
            for e in (("stored", "product") if f else ("stored",))
        ]
        best = self.score(self.unit, some), self.unit
        neutral = replace(self.unit, rounding="nearest_even", late="nearest_even", kept=None, flush="none")
        for start, steps in product((self.unit, neutral), ((*rounded, *aligned), (*aligned, *rounded))):
            here = self.score(start, some), start
            for change in (*steps, *steps):  # the second time each with what the others settled
                if here[0] == len(some):
                    break
                unit = replace(here[1], **change)
                here = (n, unit) if (n := self.score(unit, some)) > here[0] else here
            best = max(best, here, key=lambda scored: scored[0])
        if (n := self.score(best[1], everything)) > score:
            self.unit = best[1]
            self.answers.append(
                Answer("together", str(replace(self.unit, tree=(0,))).removeprefix("(0):"), n, len(self.d))
            )
        return n > score

    def _outward(self) -> None:
        where = self.p.of("output")
        if len(where):
            wide = self.unit if self.unit.fraction is None else replace(self.unit, fraction=24)
            scores = {mode: int(same(self.got(wide, where, mode), self.d[where]).sum()) for mode in MODES}
            self.out = max(scores, key=lambda mode: scores[mode])
            self.answers.append(Answer("rounding on the way out", self.out, scores[self.out], len(where)))

    def _width(self) -> None:
        """Bits kept in the alignment, and how the rest is cut: where small terms vanish."""
        p, u, where = self.p, self.unit, self.p.of("width", "width_c")
        if u.fraction is None:
            self.answers.append(Answer("bits kept in a step", "all", self.score(u, where), len(where)))
            return
        together = [at for at, triple in enumerate(TRIPLES) if _meets(u.tree, triple)]
        where = where[np.isin(p.note[where, 0], together)]
        if _has_sums(u.tree):
            where = np.intersect1d(where, p.of("width"))
        if not len(where):
            self.answers.append(Answer("bits kept in a step", "no step has three of the products asked", 0, 0))
            return
        notes = p.note[where]
        last = int(max(notes[(self.d[where] != 0) & (notes[:, 2] > 0), 1], default=0))
        widths = range(max(1, last - 3), last + 3)
        options = {f"{f}, {cut}": replace(u, fraction=f, cut=cut) for f in widths for cut in CUTS}
        self.choose("bits kept in a step", where, options)

    def _inputs(self) -> None:
        where, u = self.p.of("inputs"), self.unit
        if len(where):
            options = {"all": replace(u, input_bits=None)}
            for bits in INPUT_BITS[1:]:
                for mode in ("toward_zero", "nearest_even", "nearest_away"):
                    options[f"{bits} fraction bits, {mode}"] = replace(u, input_bits=bits, input_rounding=mode)
            self.choose("operands as read", where, options)

    def _products(self) -> None:
        p, u = self.p, self.unit
        random = p.of("raw", *RANDOM)
        if u.fraction is None:  # where products have more bits than the accumulator
            bare = trees.bare(u.tree)
            options = {"exact": replace(u, tree=bare), "rounded, then added": replace(u, tree=_all_rounded(bare))}
            if (first := _first_rounded(bare)) != bare:
                options["exact but the first of a chain"] = replace(u, tree=first)
            self.choose("products", random, options)
        else:
            options = {
                "sum of the operands'": replace(u, exponents="stored"),
                "the same, subnormals normalised": replace(u, exponents="normalised"),
                "its own": replace(u, exponents="product"),
            }
            self.choose("exponent of a product", random, options)

    def _rounding(self) -> None:
        p, u = self.p, self.unit
        kept = KEPT if self.acc.name == "float32" else (None,)
        options = {
            f"{mode}{'' if k is None else f', {k} bits kept'}": replace(u, rounding=mode, kept=k)
            for k in kept
            for mode in MODES
        }
        self.choose("rounding of a step", p.of("rounding"), options)
        if _has_sums(self.unit.tree):
            u = self.unit
            where = p.of("rounding_c", "random_normal", "random_wide")
            self.choose("rounding of sums of sums", where, {mode: replace(u, late=mode) for mode in MODES})

    def _range(self) -> None:
        """Subnormals, the least exponent of an alignment, overflow, Inf, NaN and zeros."""
        p = self.p
        tiny = p.of("subnormal_in", "subnormal_out", "subnormal_c", "random_tiny")
        u = self.unit
        options = {
            "kept": replace(u, flush="none"),
            "operands are 0": replace(u, flush="in"),
            "results are 0": replace(u, flush="out"),
            "operands and results are 0": replace(u, flush="both"),
        }
        self.choose("subnormals", tiny, options)
        u = self.unit
        if u.fraction is not None:
            lows = [None, *range(-145, -119), *range(-30, -9)]
            where = p.of("floor", "random_tiny", "subnormal_c", "subnormal_out")
            self.choose(
                "least exponent aligned to",
                where,
                {"none" if n is None else str(n): replace(u, lowest=n) for n in lows},
            )
        u = self.unit
        self.choose(
            "overflow",
            p.of("overflow"),
            {"Inf": replace(u, overflow="inf"), "the largest": replace(u, overflow="largest")},
        )
        where = p.of("special")
        n = self.score(self.unit, where)
        self.answers.append(Answer("Inf and NaN", "as IEEE 754" if n == len(where) else "otherwise", n, len(where)))
        zeros = p.of("zero")
        negative = int(np.signbit(self.d[zeros]).sum())
        signs = f"-0 in {negative} of {len(zeros)} sums of zeros" if negative else "+0"
        self.answers.append(Answer("sign of zero", signs, len(zeros), len(zeros)))


def _all_rounded(tree: Tree) -> Tree:
    if isinstance(tree, int):
        return tree if tree == C else (tree,)
    return tuple(_all_rounded(part) for part in tree)


def _first_rounded(tree: Tree) -> Tree:
    """Return a tree with the first of two products that meet rounded: a chain that starts with a product."""
    if isinstance(tree, int):
        return tree
    if len(tree) == 2 and all(isinstance(part, int) and part != C for part in tree):
        return ((tree[0],), tree[1])
    return tuple(_first_rounded(part) for part in tree)


def _has_sums(tree: Tree) -> bool:
    """Whether some node adds no product of its own."""
    if isinstance(tree, int):
        return False
    return not any(isinstance(part, int) and part != C for part in tree) or any(map(_has_sums, tree))


def _meets(tree: Tree, leaves: tuple[int, ...]) -> bool:
    if isinstance(tree, int):
        return False
    return all(k in tree for k in leaves) or any(_meets(part, leaves) for part in tree)


# ---------------------------------------------------------------- a case


def identify_product(p: Probes, d: Array, stated: str = "") -> Identified:
    """Return what explains a case's outputs ``d`` (n, tile): each row's own column, and others of its tile.

    ``stated`` is the arithmetic that a device's file has today: preferred among registered ones that explain all.
    """
    d, findings, is_product = _as_asked(p, d)
    if not is_product:
        return Identified(p.case, None, None, p.case.formats[2], "", (), (), 0, d.size, findings)
    own = d[np.arange(len(d)), np.arange(len(d)) % d.shape[1]]
    accumulators = {f.name: f for f in (p.case.formats[2], p.case.out)}
    best: _Unit | None = None
    for acc in accumulators.values():
        unit = _Unit(p, own, acc)
        is_whole = unit.structure()
        unit.decide()
        if best is None or unit.score(unit.unit, np.arange(len(own))) > best.score(best.unit, np.arange(len(own))):
            best = unit
        if is_whole and best is unit:
            break
    assert best is not None
    if best.acc.name != p.case.formats[2].name:
        findings = (*findings, f"it adds up in {best.acc.name}")
    return _confirmed(best, p, d, findings, stated)


def _confirmed(best: _Unit, p: Probes, d: Array, findings: tuple[str, ...], stated: str) -> Identified:
    """Hold the unit to every probe and to other outputs of the tiles, and registered ones to all outputs."""
    rows, columns = _looked_at(d)
    operands = p.a[rows], p.b[rows // d.shape[1] * d.shape[1] + columns], p.c[rows]
    wanted = d[rows, columns]

    def equal_of(unit: AdditionTree) -> Array:
        return same(predicted(unit, p.case, operands, best.acc, best.out), wanted)

    equal = best.settle_open(equal_of)
    formats = (p.case.formats[0].name, p.case.formats[1].name, best.acc.name)
    registered = _registered(formats, best, p, d)
    stem = stated.split(".", maxsplit=1)[0]
    chosen = (
        stated
        if stated in registered
        else min(registered, key=lambda n: (n.split(".")[0] != stem, len(n)), default=None)
    )
    if chosen and not equal.all():
        findings = (*findings, f"the answers miss {int((~equal).sum()):,} of {len(equal):,} outputs; {chosen} has all")
    elif not equal.all():
        first = int(np.flatnonzero(~equal)[0])
        near = predicted(best.unit, p.case, operands, best.acc, best.out)[first]
        where = _named(p, rows[first], columns[first], d.shape[1])
        text = f"{int((~equal).sum()):,} of {len(equal):,} outputs are unexplained; first: {where}"
        findings = (*findings, f"{text}: {wanted[first].item().hex()}, the nearest unit gives {near.item().hex()}")
    if chosen is None and not p.case.has_c and trees.step_of(best.unit.tree) is None:
        findings = (*findings, "C was not given: it is taken to be added last")
    step = trees.step_of(best.unit.tree)
    unit = replace(best.unit, tree=trees.normal(best.unit.tree) if step is None else step)
    name = chosen or (stated_name(*formats, _with_c(unit)) if equal.all() else None)
    counts = (d.size, d.size) if chosen else (int(equal.sum()), len(equal))
    return Identified(p.case, name, unit, best.acc, best.out, tuple(best.answers), registered, *counts, findings)


def _registered(formats: tuple[str, ...], best: _Unit, p: Probes, d: Array) -> tuple[str, ...]:
    """Return the registered arithmetics that explain every output of every tile; alike ones are computed once."""
    found, known, side = [], dict[tuple[object, ...], bool](), d.shape[1]
    few = slice(0, 256)
    for name, u in ARITHMETICS.items():
        if (u.a_format, u.b_format, u.acc_format) != formats or u.scale_block or p.case.depth % u.k:
            continue
        groups = u.index_groups and u.k
        late = u.c_mode == "late" and u.k
        alike = (
            u.method,
            u.block if u.method != "sequential" else 0,
            u.fraction_bits,
            u.rounding,
            u.kept_fraction_bits,
            u.index_groups,
            groups,
            late,
            u.min_alignment_exponent,
        )
        if alike not in known:
            known[alike] = True
            for part in (few, slice(None)):
                got = by_registry(name, p.case, p.a[part], p.b[part], p.c[part], side)
                got = got if best.acc.name == p.case.out.name else round_to(got, p.case.out, best.out)
                if not same(got, d[part]).all():
                    known[alike] = False
                    break
        if known[alike]:
            found.append(name)
    return tuple(found)


def _with_c(unit: AdditionTree) -> AdditionTree:
    """Return a unit that takes c: at the end, where none was given."""
    return unit if C in leaves_of(unit.tree) else replace(unit, tree=(C, unit.tree))


def _looked_at(d: Array) -> tuple[Array, Array]:
    """Return rows and columns of the diagonals of tiles, and of at most `MOST_OTHERS` other outputs, evenly spread."""
    side, rows = d.shape[1], np.arange(len(d))
    places = np.arange(d.size)
    places = places[places // side % side != places % side]
    places = places[:: max(1, -(-len(places) // MOST_OTHERS))]
    return np.concatenate([rows, places // side]), np.concatenate([rows % side, places % side])


def _named(p: Probes, row: int, column: int, side: int) -> str:
    if row % side != column:
        return f"row {row}, column {column} of its tile"
    question = QUESTIONS[int(p.question[row])]
    return f"row {row}, {question} {tuple(int(x) for x in p.note[row])}"


def _as_asked(p: Probes, d: Array) -> tuple[Array, tuple[str, ...], bool]:
    """Return D as it was asked for, what was seen of it, and whether it is a product: of A, B and C at all.

    Random rows say so, to a 64th: swapped operands give D's transpose, or each other's formats; C may be left out.
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
        return turned, ("operands are swapped: D is the transpose of the product asked for; read as that",), True
    if p.case.has_c and fits(a, b, 0 * c, got):
        return d, (f"C takes no part in D: give C, or ask without it ({p.case.name}.to_...)",), False
    if fa.name != fb.name:
        x, y = (decoded(encoded(z, f.name), g.name) for z, f, g in ((a, fa, fb), (b, fb, fa)))
        if fits(x, y, c, got):
            return d, ("formats of A and B are swapped: each was read in the other's",), False
    return (
        d,
        ("D is not the product that was asked for, not even in its leading bits: are its tiles cut otherwise?",),
        False,
    )


def goes_on(one: Identified, p: Probes, d: Array) -> Answer:
    """Return how a product four times as long goes on: as the unit's steps, or cut by a library along K."""
    assert one.unit is not None
    own = d[np.arange(len(d)), np.arange(len(d)) % d.shape[1]]
    scores = {}
    for name, tree in trees.continued(one.unit.tree, LONG_K).items():
        got = predicted(replace(one.unit, tree=tree), p.case, (p.a, p.b, p.c), one.acc, one.out)
        scores[name] = int(same(got, own).sum())
    best = max(scores, key=lambda n: scores[n])
    others = tuple(n for n, s in scores.items() if s == scores[best] and n != best)
    words = best if scores[best] == len(own) else "otherwise: a library cuts K in a way that is not known here"
    return Answer(f"products of K = {LONG_K}", words, scores[best], len(own), others)
