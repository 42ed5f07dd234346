"""Page: the best configuration of public kernels as predicted, against an H100, with classes of bits against hashes."""

from __future__ import annotations

from itertools import combinations, groupby
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from npusim.program.timing.timing_result import Limit
from npusim.simulation.ranking import Prediction, ranked
from reports.parts.document import Section, gather, percent, save_page, table
from reports.tune.record import GAP_US, recorded

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["write"]

#: Smallest ratio of the measured times of a ranked pair of configurations; largest ratio to the best time of
#: configurations whose errors count.
APART, WITHIN = 1.02, 2.0
#: Number of first ranks that may be measured; largest cost of the first rank relative to the best.
FIRST, ALLOWED = 3, 0.05


class Sweep(NamedTuple):
    """Configurations of one kernel at one shape with a time on both sides, and those without one on both."""

    kernel: str
    shape: str
    measured: list[float]
    predictions: list[Prediction]
    hashes: list[str]
    refused: int
    disputed: int

    def figures(self) -> dict[str, object]:
        """Return the figures of the page on the sweep."""
        measured, order = self.measured, ranked(self.predictions)
        best = min(measured)
        times = [(p.us or 0.0) + GAP_US for p in self.predictions]
        errors = [abs(p / m - 1) for p, m in zip(times, measured, strict=True)]
        pairs = [
            (measured[i] - measured[j]) * (times[i] - times[j])
            for i, j in combinations(range(len(measured)), 2)
            if max(measured[i], measured[j]) > APART * min(measured[i], measured[j])
        ]
        found = set(zip(self.hashes, (p.key for p in self.predictions), strict=True))
        return {
            "configurations": len(measured),
            "refused": self.refused,
            "disputed": self.disputed,
            "regret": measured[order[0]] / best - 1,
            "regret_of_first": min(measured[i] for i in order[:FIRST]) / best - 1,
            "pairs": len(pairs),
            "tau": sum((x > 0) - (x < 0) for x in pairs) / len(pairs) if pairs else None,
            "median_error": median(e for e, m in zip(errors, measured, strict=True) if m <= WITHIN * best),
            "largest_error": max(errors),
            "hashes": len({h for h, _ in found}),
            "classes": len({key for _, key in found}),
            "equal": len({h for h, _ in found}) == len({key for _, key in found}) == len(found),
        }


def write(folder: Path) -> list[Path]:
    """Write ``tune.md`` and its data to ``folder``."""
    made = [(sweep.kernel, sweep.shape, sweep.figures()) for sweep in sweeps()]
    return save_page(folder, "tune", gather("tune", [_times(made), _bits(made)]))


def sweeps() -> list[Sweep]:
    """Return the recorded sweeps in the order of the file."""
    rows = recorded()
    found = []
    for (kernel, shape), group in groupby(rows, lambda r: (r["kernel"], r["shape"])):
        every = list(group)
        both = [r for r in every if r["measured_us"] and r["predicted_us"]]
        neither = sum(not r["measured_us"] and not r["predicted_us"] for r in every)
        predictions = [
            Prediction(
                us=float(r["predicted_us"]),
                key=r["class"],
                spilled=int(r["spilled"]),
                warps=int(r["warps"]),
                limit=Limit(r["limit"], 0.0, is_link=r["limit"] in ("hbm", "l2")),
            )
            for r in both
        ]
        measured = [float(r["measured_us"]) for r in both]
        disputed = len(every) - len(both) - neither
        found.append(Sweep(kernel, shape, measured, predictions, [r["hash"] for r in both], neither, disputed))
    return found


def _times(made: list[tuple[str, str, dict[str, object]]]) -> Section:
    header = ["kernel", "shape", "configurations", "regret", f"best of {FIRST}", "tau", "median error", "largest error"]
    rows = [
        [
            kernel,
            shape.replace("x", " x "),
            str(f["configurations"]),
            *(percent(float(str(f[n]))) for n in ("regret", "regret_of_first")),
            "no pairs" if f["tau"] is None else f"{f['tau']:.2f}",
            *(percent(float(str(f[n]))) for n in ("median_error", "largest_error")),
        ]
        for kernel, shape, f in made
    ]
    figures = [f for *_, f in made]
    fields = {
        "sweeps": str(len(made)),
        "counted": str(sum(int(str(f["configurations"])) for f in figures)),
        "allowed": percent(ALLOWED),
        "within": str(sum(float(str(f["regret"])) <= ALLOWED for f in figures)),
        "worst_regret": percent(max(float(str(f["regret"])) for f in figures)),
        "worst_of_first": percent(max(float(str(f["regret_of_first"])) for f in figures)),
        "refused": str(sum(int(str(f["refused"])) for f in figures)),
        "disputed": str(sum(int(str(f["disputed"])) for f in figures)),
        "times": table(header, rows),
    }
    return dict(fields), {"sweeps": [{"kernel": kernel, "shape": shape, **f} for kernel, shape, f in made]}


def _bits(made: list[tuple[str, str, dict[str, object]]]) -> Section:
    rows = [
        [kernel, shape.replace("x", " x "), str(f["hashes"]), str(f["classes"]), "yes" if f["equal"] else "no"]
        for kernel, shape, f in made
    ]
    fields = {
        "equal": str(sum(f["equal"] is True for *_, f in made)),
        "bits": table(["kernel", "shape", "hashes", "classes", "same partition"], rows),
    }
    return dict(fields), {}
