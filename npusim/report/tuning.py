"""Ranked configurations: the table of ``npusim tune``, its JSON, and the choices for several shapes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from operator import attrgetter
from typing import Any, NamedTuple

from npusim.late_methods import dataclass
from npusim.report.text import Block, Cell, Column, Columns, Fact, Facts, Heading, document, percent
from npusim.simulation.ranking import Prediction, ranked
from npusim.simulation.request import command
from npusim.studies.tune.prediction import Configuration, kept, lettered
from npusim.units import plural


class Ranked(NamedTuple):
    """A configuration of a ranking: its fields as text, the letter of its class of bits, and its prediction."""

    label: str
    letter: str
    of: Prediction

    @property
    def error(self) -> str | None:
        """The errors of earlier predictions of this kind, in short form; None if none were measured."""
        return None if self.of.errors is None else self.of.errors.short or None

    @property
    def limit(self) -> str:
        """What limits the time; empty if nothing does."""
        return str(self.of.limit) if self.of.limit.name else ""


#: A configuration of a ranking: each figure in the form of the table and in the form of JSON.
RANKED = Columns(
    Column("configuration", "label", key="configuration"),
    Column("us", attrgetter("of.us"), ",.2f", ">", key="us"),
    Column("error", "error", key="error"),
    Column("bits", "letter", key="bits"),
    Column("registers", attrgetter("of.registers"), align=">", key="registers"),
    Column(
        "spilled",
        lambda r: None if r.of.registers is None else r.of.spilled,
        align=">",
        key="spilled",
        json=attrgetter("of.spilled"),
    ),
    Column("limit", lambda r: f"{r.limit} {percent(r.of.limit.share)}", key="limit", json=attrgetter("limit")),
    Column(None, attrgetter("of.limit.share"), key="limit_share"),
    spare=("spilled", "registers"),
)
#: Table of configurations whose kind was never measured.
_UNMEASURED = Columns(*(c for c in RANKED.columns if c.title != "error"), spare=RANKED.spare)


@dataclass(frozen=True, repr=False)
class Tuning:
    """The ranking of ``npusim tune`` for one shape: configurations with predicted times and classes of equal bits.

    Attributes
    ----------
    name, shape, device : str
        The kernel, the sizes of the shape (empty: the call's), and the device.
    configurations : sequence of Configuration
        The configurations in the order of the search.
    predictions : sequence of Prediction
        One per configuration: ``us``, microseconds of the cores without a launch (None: ``reason`` states why),
        registers per thread, and the limit of the time.
    bits : str
        The classes of bits in the ranking: ``any``, or a value of `npusim.studies.tune.prediction.kept`.
    order : list of int
        Numbers of the configurations, best first.
    letters : dict of int to str
        Class of equal bits of each configuration with a time.

    Examples
    --------
    >>> from npusim.report.tuning import Tuning
    >>> from npusim.simulation.ranking import Prediction
    >>> from npusim.simulation.request import Request
    >>> from npusim.studies.tune.prediction import Configuration
    >>> configurations = [Configuration({"stages": n}, Request("flash")) for n in (2, 3)]
    >>> Tuning("flash", "", "h200", configurations, [Prediction(9.0, "a"), Prediction(7.5, "a")])
    <Tuning of flash on h200: 2 configurations; best stages=3: 7.50 us>
    """

    name: str
    shape: str
    device: str
    configurations: Sequence[Configuration]
    predictions: Sequence[Prediction]
    bits: str = "any"

    @cached_property
    def order(self) -> list[int]:
        """Numbers of the configurations that ``bits`` selects, best first."""
        return kept(self.predictions, self.bits, 0 if self.predictions[0].us is not None else None)

    @cached_property
    def letters(self) -> dict[int, str]:
        """Class of bits of each configuration with a time."""
        return lettered(self.predictions, ranked(self.predictions))

    def __repr__(self) -> str:
        """Return the subject and the best configuration, on one line."""
        best = next((i for i in self.order if self.predictions[i].us is not None), None)
        winner = "none has a time"
        if best is not None:
            winner = f"best {self.configurations[best].label()}: {self.predictions[best].us:,.2f} us"
        shape = f" {self.shape}" if self.shape else ""
        subject = f"{self.name}{shape} on {self.device}"
        count = len(self.configurations)
        return f"<Tuning of {subject}: {count} {plural(count, 'configuration')}; {winner}>"

    def shared(self, numbers: Sequence[int]) -> dict[str, object]:
        """Return the fields that have the same value in all of these configurations; empty if the configurations differ
        in no field.
        """
        listed = [self.configurations[i].fields for i in numbers]
        shared = {n: v for n, v in listed[0].items() if all(n in each and each[n] == v for each in listed)}
        return {} if all(each.keys() <= shared.keys() for each in listed) else shared

    def row(self, number: int) -> dict[str, Any]:
        """Return the row of one configuration."""
        return RANKED.record(self.line(number, self.configurations[number].label()))

    def line(self, number: int, label: str) -> Ranked:
        """Return one configuration, with this label, in the form that the columns of `RANKED` read."""
        return Ranked(label, self.letters[number], self.predictions[number])

    def pick(self) -> dict[str, Any]:
        """Return the best configuration of the shape, for a build script."""
        best = self.order[0]
        fields = dict(self.configurations[best].fields)
        return {"shape": self.shape, "device": self.device, **self.row(best), "fields": fields, **self.uses()}

    def uses(self) -> dict[str, str]:
        """Return the command that runs the best configuration and the decorator that states it; each only if
        it exists.
        """
        best = self.configurations[self.order[0]]
        asked = best.request.asked()
        run = "" if asked is None else command("run", best.request.schedule, asked, ())
        return {n: text for n, text in (("run", run), ("decorator", best.decorator)) if text}

    def errors(self) -> str:
        """Return the errors of earlier predictions of the best configuration's kind."""
        known = self.predictions[self.order[0]].errors
        measured = known is not None and known.cases > 0
        return known.text(self.name, self.device) if known is not None and measured else "not measured"


def tuning_table(tuning: Tuning, top: int) -> Iterator[Block]:
    """Yield the best ``top`` configurations, the best one of each class of bits, and, by reason, the configurations
    without a time.
    """
    order, listed = tuning.order, tuning.configurations
    without = [p.reason for p in tuning.predictions if p.us is None]
    shape = f" {tuning.shape}" if tuning.shape else ""
    yield Heading(f"{tuning.name}{shape}: {len(listed)} configurations, {len(without)} without a time", tuning.device)
    shared = tuning.shared(order[:top])
    labels = {i: tuning.configurations[i].label(shared) for i in order[:top]}
    rows = [tuning.line(i, label) for i, label in labels.items()]
    yield (RANKED if any(row.error for row in rows) else _UNMEASURED).grid(rows)
    all_have = " ".join(f"{n}={v}" for n, v in shared.items())
    facts: list[Fact] = [("all have", (Cell(all_have),))] if shared else []
    facts += [(f"class {letter}", (Cell(text),)) for letter, text in _classes(tuning)]
    facts += [(name, (Cell(text, whole=True),)) for name, text in tuning.uses().items()]
    facts.append(("errors", (Cell(tuning.errors()),)))
    facts += [("no time", tuple(Cell(f"{n}: {reason}") for reason, n in Counter(without).items()))] if without else []
    yield Facts(tuple(facts))


def _classes(tuning: Tuning) -> Iterator[tuple[str, str]]:
    """Yield the classes of bits, each with its size, its best configuration and the additional time of its best
    configuration.
    """
    letters, order = tuning.letters, ranked(tuning.predictions)
    best_us = tuning.predictions[order[0]].us or 0.0
    for letter, count in Counter(letters.values()).items():
        first = next(i for i in order if letters[i] == letter)
        us = tuning.predictions[first].us or 0.0
        known = "not proved equal to one another" if letter == "?" else f"{count} with equal bits for finite inputs"
        cost = f"{(us / best_us - 1) * 100:.1f} % slower than the best" if us > 1.0005 * best_us else "the best time"
        best, alone = tuning.configurations[first].label(), count == 1 and letter != "?"
        reference = f", the first configuration{'' if alone else ' among them'}" if letters.get(0) == letter else ""
        yield letter, f"{best} alone{reference}: {cost}" if alone else f"{known}{reference}; best: {best}, {cost}"


def tuning_document(tunings: Sequence[Tuning]) -> dict[str, object]:
    """Return the rankings as JSON data, best first, with the reasons of configurations without a time."""
    shapes = [
        {
            "shape": t.shape,
            "device": t.device,
            "ranking": [t.row(i) for i in t.order],
            "best": t.uses() | {"errors": t.errors()},
            "without": {t.configurations[i].label(): p.reason for i, p in enumerate(t.predictions) if p.us is None},
        }
        for t in tunings
    ]
    return document("tuning", shapes=shapes)
