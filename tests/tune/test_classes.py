"""Configurations of packaged schedules in one class of `npusim tune` have equal outputs, element by element."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import npusim
from npusim.program.numerics.evaluate import chosen, execute_rows
from npusim.simulation.chosen_tile import program_of
from npusim.simulation.classes import class_key
from npusim.simulation.evaluation import source_of, subject_of
from npusim.simulation.plan import plan_of
from npusim.simulation.request import Request
from npusim.studies.tune.configurations import configurations_of
from npusim.studies.tune.prediction import predict

if TYPE_CHECKING:
    from npusim.studies.tune.prediction import Configuration

SMALL = {"workload": "smollm2", "numerics": False}
#: A schedule, its call, the fields that vary, and how many classes and outputs there are.
CASES: list[tuple[str, dict[str, Any], dict[str, list[Any]], int, int]] = [
    # Parts of keys begin at other places.
    ("split_kv", {"seq_q": 1, "seq_kv": 500}, {"splits": [2, 4], "block_kv": [64]}, 2, 2),
    ("split_kv", {"seq_q": 1, "seq_kv": 500, "hw": "h100"}, {"splits": [2, 3, 4], "block_kv": [64]}, 3, 3),
    # A tile that the mask hides moves PASA's means.
    ("pasa", {"seq": 250}, {"block_q": [64, 128], "block_kv": [64]}, 2, 2),
    # Rows a block and stages change no bit, keys a tile do.
    ("flash", {"seq": 250, "causal": True, "hw": "h100"}, {"block_q": [64, 128], "block_kv": [32, 64]}, 2, 2),
    ("flash", {"seq": 250, "causal": True}, {"block_q": [32, 64], "block_kv": [64, 128], "depth": [1, 2]}, 2, 2),
]


def output(configuration: Configuration) -> bytes:
    plan, program = program_of(plan_of(configuration.request, is_bare=True), is_hinted=False)
    subject = subject_of(plan, program)
    rows = execute_rows(program, source_of(plan, subject), chosen("rows", "all", subject.output.seq_q), range(1))[1]
    by_row: list[np.ndarray[Any, Any]] = [np.ascontiguousarray(rows[k]) for k in sorted(rows)]
    return np.concatenate(by_row).tobytes()


@pytest.mark.parametrize(
    ("schedule", "call", "fields", "classes", "outputs"), CASES, ids=[f"{c[0]} {c[1].get('hw', '')}" for c in CASES]
)
def test_one_class_has_one_output(
    schedule: str, call: dict[str, Any], fields: dict[str, list[Any]], classes: int, outputs: int
) -> None:
    by_class = defaultdict[str, set[bytes]](set)
    for configuration in configurations_of(Request(schedule, **SMALL, **call), fields):
        predicted = predict(configuration)
        assert predicted.key, predicted.reason
        by_class[predicted.key].add(output(configuration))
    assert all(len(different) == 1 for different in by_class.values()), "one class, several outputs"
    assert len(by_class) == classes
    assert len(set.union(*by_class.values())) == outputs


def test_a_run_whose_tile_is_chosen_says_its_class() -> None:
    notes = [npusim.run("flash", seq=512, numerics=False, hw=hw).notes for hw in ("h100", "h200")]
    said = {next(n for n in of if n.startswith("tile=auto")).rpartition("; bits of class ")[2] for of in notes}
    plan, program = program_of(plan_of(Request("flash", seq=512, numerics=False, hw="h100"), is_bare=True))
    assert said == {class_key(program, plan.device)[:8]}  # the same tile of the same cores
