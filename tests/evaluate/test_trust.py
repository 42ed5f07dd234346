"""The order that is trusted is right in nine of ten pairs, and the first tenth of a ranking has a fast candidate."""

from __future__ import annotations

import csv
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from npusim.studies.evaluate.evaluation import CLOSE, Findings, Microseconds, compared

#: Times of configurations of public Triton kernels on an H100, with npusim's predictions.
TIMES = Path(__file__).parents[2] / "reports" / "tune" / "predictions.csv"
#: Kernels on which the share was fitted, and those that were kept out.
FITTED, OTHERS = ("tut03_matmul", "unsloth_rms"), ("kernels_flash", "tut02_softmax")
POOLS, SIZE = 60, 12
Pool = list[tuple[Microseconds, float]]


def pools() -> dict[tuple[str, str], list[Pool]]:
    """Return, by kernel and shape, pools of twelve configurations: predictions and measured times."""
    sweeps = defaultdict(list)
    for row in csv.DictReader(TIMES.read_text(encoding="utf-8").splitlines()):
        if row["predicted_us"] and row["measured_us"]:
            is_link = row["limit"] in ("hbm", "l2")
            how = {"spilled": int(row["spilled"]), "warps": int(row["warps"]), "is_link": is_link, "key": row["class"]}
            one = Microseconds(None, float(row["predicted_us"]), None, limit=row["limit"], is_ranked=True, **how)
            sweeps[row["kernel"], row["shape"]].append((one, float(row["measured_us"])))
    rng = np.random.default_rng(0)
    draws = {
        at: [
            rng.choice(len(all_), min(SIZE, len(all_)), replace=False) for _ in range(POOLS if len(all_) > SIZE else 1)
        ]
        for at, all_ in sweeps.items()
    }
    return {at: [[sweeps[at][i] for i in draw] for draw in of] for at, of in draws.items()}


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
    assert 0.85 <= np.mean(trusted) <= 0.95, np.mean(trusted)
    assert np.mean(others) < np.mean(trusted) - 0.1
    assert CLOSE < 0.2


def test_the_first_tenth_has_a_fast_candidate() -> None:
    shares = {}
    for at, of in pools().items():
        if len(of) == POOLS:
            regrets = []
            for pool in of:
                measured = [us for _, us in in_order(pool)]
                regrets.append(min(measured[:2]) / min(measured) - 1)  # a tenth of twelve, rounded up
            shares[at] = float(np.mean(np.array(regrets) <= 0.05))
    assert len(shares) == 8
    assert min(shares.values()) >= 0.7, shares
    assert np.mean(list(shares.values())) >= 0.9, shares
