"""The order that is trusted is right in nine of ten pairs, and the first tenth of a ranking has a fast candidate."""

from __future__ import annotations

import csv
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from npusim.studies.evaluate.evaluation import CLOSE, Findings, Microseconds, compared
from reports.tune.recorded import fresh_shapes, other_shapes

#: Times of configurations of public Triton kernels on an H100, and of thirteen others on an H200, with npusim's
#: predictions.
TIMES, OTHER_TIMES = (
    Path(__file__).parents[2] / "reports" / "tune" / name for name in ("predictions.csv", "recorded.csv")
)
#: Kernels on which the share was fitted, and those that were kept out.
FITTED, OTHERS = ("tut03_matmul", "unsloth_rms"), ("kernels_flash", "tut02_softmax")
POOLS, SIZE = 60, 12
Pool = list[tuple[Microseconds, float]]


def sweeps(file: Path) -> dict[tuple[str, str], Pool]:
    """Return the predictions and measured times of a file, by kernel and shape."""
    found = defaultdict(list)
    for row in csv.DictReader(file.read_text(encoding="utf-8").splitlines()):
        if row["predicted_us"] and row["measured_us"]:
            is_link = row["limit"] in ("hbm", "l2")
            how = {"spilled": int(row["spilled"]), "warps": int(row["warps"]), "is_link": is_link, "key": row["class"]}
            one = Microseconds(None, float(row["predicted_us"]), None, limit=row["limit"], is_ranked=True, **how)
            found[row["kernel"], row["shape"]].append((one, float(row["measured_us"])))
    return found


def pools() -> dict[tuple[str, str], list[Pool]]:
    """Return, by kernel and shape, pools of twelve configurations: predictions and measured times."""
    every = sweeps(TIMES)
    rng = np.random.default_rng(0)
    draws = {
        at: [
            rng.choice(len(all_), min(SIZE, len(all_)), replace=False) for _ in range(POOLS if len(all_) > SIZE else 1)
        ]
        for at, all_ in every.items()
    }
    return {at: [[every[at][i] for i in draw] for draw in of] for at, of in draws.items()}


def regret(pool: Pool) -> float:
    """Return how much slower the better of the first two of a ranking is than the best."""
    measured = [us for _, us in in_order(pool)]
    return min(measured[:2]) / min(measured) - 1  # a tenth of twelve, rounded up


def in_order(pool: Pool) -> list[tuple[bool, float]]:
    """Return whether a candidate is trusted, and its measured time, in the order of ranks."""
    judged = compared({i: Findings(str(i), us={"h100": us}) for i, (us, _) in enumerate(pool)}, ["h100"])
    order = sorted(zip(judged, pool, strict=True), key=lambda both: both[0].rank["h100"])
    return [(e.trust is True, measured) for e, (_, measured) in order]


@pytest.mark.parametrize("kernels", [FITTED, OTHERS])
def test_a_trusted_order_is_right_in_nine_of_ten(kernels: tuple[str, ...]) -> None:
    pairs = [
        (is_trusted, own <= following)
        for at, of in pools().items()
        if at[0] in kernels
        for pool in of
        for (is_trusted, own), (_, following) in pairwise(in_order(pool))
    ]
    trusted = [is_right for is_trusted, is_right in pairs if is_trusted]
    others = [is_right for is_trusted, is_right in pairs if not is_trusted]
    assert len(trusted) > 500
    # Attention, among the others, is timed by machine code and nearer than the errors from which trust is computed.
    assert 0.85 <= np.mean(trusted) <= (0.95 if kernels == FITTED else 0.97), np.mean(trusted)
    assert np.mean(others) < np.mean(trusted) - 0.1
    assert CLOSE < 0.2


def test_the_first_tenth_has_a_fast_candidate() -> None:
    shares = {}
    for at, of in pools().items():
        if len(of) == POOLS:
            shares[at] = float(np.mean(np.array([regret(pool) for pool in of]) <= 0.05))
    assert len(shares) == 8
    assert min(shares.values()) >= 0.7, shares
    assert np.mean(list(shares.values())) >= 0.9, shares


def test_the_first_two_have_a_fast_candidate_of_other_kernels_too() -> None:
    """On an H200, where no constant was fitted on them: three of fourteen kernels have none, and lose 6 to 17 %.

    A cross entropy that reads a row twice has its second reads in L2, which it has not on the chip.  Most tiles of a
    GEGLU are predicted within 3 % of one another, and their times differ by 46 %.  Cumulative sums of two heads a
    program, whose loads and work do not overlap on the chip, are 25 % too fast; at six other shapes the first one
    loses less than before sectors were counted, 49 % in all for 116.
    """
    regrets = {kernel: regret(pool) for (kernel, _), pool in sweeps(OTHER_TIMES).items()}
    assert len(regrets) == 14
    slow = {kernel: round(lost, 3) for kernel, lost in regrets.items() if lost > 0.05}
    assert set(slow) <= {"liger_cross_entropy", "unsloth_geglu_exact", "mamba_chunk_cumsum"}, slow
    assert max(regrets.values()) <= 0.18, slow


def test_one_class_has_one_hash_on_the_chip() -> None:
    hashes: dict[tuple[str, ...], set[str]] = {}
    with OTHER_TIMES.open(encoding="utf-8") as rows:
        for row in csv.DictReader(rows):
            hashes.setdefault((row["kernel"], row["shape"], row["class"]), set()).add(row["hash"])
    assert len(hashes) >= 40
    assert {at: found for at, found in hashes.items() if len(found) > 1} == {}


def test_an_order_that_is_trusted_is_right_more_often_of_other_kernels_too() -> None:
    pairs = [
        (is_trusted, own <= following)
        for pool in sweeps(OTHER_TIMES).values()
        for (is_trusted, own), (_, following) in pairwise(in_order(pool))
    ]
    trusted, others = ([right for is_trusted, right in pairs if is_trusted == wanted] for wanted in (True, False))
    assert len(trusted) >= 15
    assert np.mean(trusted) >= 0.8, (np.mean(trusted), len(trusted))
    assert np.mean(others) < np.mean(trusted) - 0.1


def test_times_at_other_shapes_are_given_or_kept_by_shape() -> None:
    halves: dict[tuple[str, str], set[str]] = {}
    for row in (rows := other_shapes()):
        halves.setdefault((row["kernel"], row["shape"]), set()).add(row["half"])
    assert len(rows) == 129
    assert len(halves) == 17
    assert all(len(half) == 1 for half in halves.values())
    assert set().union(*halves.values()) == {"given", "kept"}
    assert all(float(row["us"]) > 1 for row in rows)


def test_fresh_times_are_given_or_kept_by_shape() -> None:
    halves: dict[tuple[str, str], set[str]] = {}
    for row in (rows := fresh_shapes()):
        halves.setdefault((row["kernel"].partition(":")[0], row["shape"]), set()).add(row["half"])
    assert len({(r["kernel"], r["shape"], r["config"]) for r in rows}) == len(rows) == 363
    assert all(len(half) == 1 for half in halves.values())
    assert 0.4 < sum(half == {"given"} for half in halves.values()) / len(halves) < 0.6
    assert all(float(row["us"]) > 1 for row in rows)
