from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import npusim
from npusim.config.load import load_workload
from npusim.config.node_file import NodeSpec, load_node

if TYPE_CHECKING:
    from collections.abc import Callable

    from npusim.simulation.run_result import RunData


@pytest.fixture(scope="session")
def mesh() -> NodeSpec:
    """Eight NPUs, every pair joined."""
    return load_node("ascend_910b2_x8")


@pytest.fixture(scope="session")
def pair() -> NodeSpec:
    """Two GPUs on a switch."""
    return load_node("h200_x2")


@pytest.fixture(scope="session")
def run_node() -> Callable[..., RunData]:
    """Return a function that runs a node schedule without tracing."""
    load = load_workload("pangu_38b")

    def run(schedule: str, hw: Any, problem: Any = None, **tiling: Any) -> RunData:
        named = load if problem is None else None
        return npusim.run(schedule, hw=hw, workload=named, problem=problem, tiling=tiling, numerics=False)

    return run


def changed(node: NodeSpec, **updates: Any) -> NodeSpec:
    """Return a node with other values, through its file's form."""
    data = node.model_dump(by_alias=True)
    for key, value in updates.items():
        place, *parts = key.split("__")
        target = data
        for part in parts:
            target, place = target[place], part
        target[place] = value
    return NodeSpec.model_validate(data)


def assumed(value: float) -> dict[str, object]:
    """Return a number as a file has it."""
    return {"value": value, "basis": "assumed", "source": "test"}
