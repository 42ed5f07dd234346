"""Input tensors: made from a workload's recipe, head by head, or given by the user."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from npusim import formats
from npusim.spec.data import NormalData, UniformData

if TYPE_CHECKING:
    from collections.abc import Mapping

    from npusim.numerics.store import HeadSource
    from npusim.spec.problem import Problem

Array = NDArray[Any]
NAMES = ("q", "k", "v")


def recipe_source(problem: Problem, seed: int | None = None) -> HeadSource:
    """Return a source of inputs drawn from the problem's recipe.

    Every head has its own generator, seeded by (seed, tensor, batch, head): a head's values do not
    depend on which other heads are computed.
    """
    made: dict[tuple[str, int, int], Array] = {}
    shapes = {
        "q": (problem.seq_q, problem.head_dim),
        "k": (problem.seq_kv, problem.head_dim),
        "v": (problem.seq_kv, problem.value_head_dim),
    }
    start = problem.data.seed if seed is None else seed

    def source(name: str, batch: int, head: int) -> Array:
        key = (name, batch, head)
        if key not in made:
            rng = np.random.default_rng([start, NAMES.index(name), batch, head])
            made[key] = formats.cast(_draw(problem, rng, shapes[name]), problem.dtype)
        return made[key]

    return source


def _draw(problem: Problem, rng: np.random.Generator, shape: tuple[int, int]) -> Array:
    recipe = problem.data
    match recipe:
        case NormalData():
            values = rng.standard_normal(shape, np.float32)
            return np.float32(recipe.mean) + np.float32(recipe.deviation) * values
        case UniformData():
            return rng.uniform(recipe.x0 - recipe.amplitude, recipe.x0 + recipe.amplitude, shape)
    raise AssertionError(f"no generator for {recipe}")


def array_source(tensors: Mapping[str, Array]) -> HeadSource:
    """Return a source that cuts heads out of (batch, heads, rows, cols) arrays."""
    return lambda name, batch, head: tensors[name][batch, head]
