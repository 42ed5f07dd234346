"""Inputs on which candidates are judged: the given call, other values, other shapes, and extremes."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from npusim.studies.stress.aspects import MOVED, NEGATIVE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from npusim.config.problem import AnyProblem, Problem

#: Numbers of queries and keys that are not multiples of a tile; number of keys of the other small calls.
ODD, SMALL = (67, 131), 64
#: Largest size of a product's other calls.
LARGEST = 256
#: Points of a stress search (`npusim.studies.stress.aspects`) at which a right kernel must be right, by kind of inputs.
OF_ATTENTION: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        "scores far apart": {"logit_std": 4.0},
        "a late key with the largest score": {"late": 16.0},
        "scores moved": {"logit_mean": 32.0},
        # this tests a maximum that begins with 0, with which weights in float16 are 0
        "scores moved below 0": {"logit_mean": -32.0},
        "large values": {"values": 32.0},
        "queries of zeros": {"zero": 1.0},
    }
)
OF_TENSORS: Mapping[str, Mapping[str, float]] = MappingProxyType(
    {
        "large inputs": {"scale": 4.0},
        "small inputs": {"scale": 2.0**-10},  # this tests an epsilon: inside a root, or after it
        "negative inputs": {NEGATIVE: 1.0},  # this tests a maximum that includes a 0 beyond a row
        # the exponential of each value, without subtraction of the maximum, is 0
        "inputs moved far below 0": {MOVED: -128.0},
        "one large column": {"channels": 64.0},
        "zeros": {"zero": 1.0},
    }
)


@dataclass(frozen=True)
class JudgedCase:
    """One call: its name, changes of the problem's sizes, the seed of its inputs, and a point of stress.

    ``rows``: which rows of the output are judged; ``is_given``: whether the caller asked for this call.
    """

    name: str
    sizes: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    point: Mapping[str, float] = field(default_factory=dict)
    rows: str = "all"
    is_given: bool = False

    @property
    def has_given_values(self) -> bool:
        """Whether the case has the sizes of the given call, and no extreme inputs; its values may differ."""
        return not self.sizes and not self.point


def attention_cases(problem: Problem, seed: int, shapes: Sequence[Mapping[str, int]]) -> Iterator[JudgedCase]:
    """Yield the calls on which an attention is judged; ``shapes``: changed sizes of further calls."""
    yield JudgedCase("the given call", {}, seed, rows="sample", is_given=True)
    yield JudgedCase("other values", {}, seed + 1, rows="sample", is_given=True)
    for shape in shapes:
        yield JudgedCase(" ".join(f"{n}={x}" for n, x in shape.items()), shape, seed + 2, rows="sample", is_given=True)
    if problem.lengths or problem.query_lengths or problem.documents or problem.bias is not None:
        return  # sizes of such calls depend on one another
    few = min(problem.kv_heads, 2)
    heads = {"batch": 1, "kv_heads": few, "heads": few * min(problem.heads // problem.kv_heads, 4)}
    is_decoding = problem.seq_q == 1
    queries, keys = (1 if is_decoding else ODD[0]), ODD[1]
    yield JudgedCase("sizes that do not divide", {**heads, **_tokens(queries, keys)}, seed + 3)
    yield JudgedCase("one row", {**heads, **_tokens(1, 2 * SMALL + 72)}, seed + 4)
    yield JudgedCase(
        "one head", {"batch": 1, "kv_heads": 1, "heads": 1, **_tokens(1 if is_decoding else SMALL, SMALL)}, seed + 5
    )
    for number, (name, point) in enumerate(OF_ATTENTION.items()):
        sizes = {**heads, **_tokens(1 if is_decoding else SMALL, 2 * SMALL)}
        yield JudgedCase(name, sizes, seed + 6 + number, point)


def tensor_cases(problem: AnyProblem, seed: int, shapes: Sequence[Mapping[str, int]]) -> Iterator[JudgedCase]:
    """Yield the calls on which a kernel of plain tensors is judged.

    A product with large sizes is judged twice: on a sample of its rows, and on all rows of a smaller product.
    """
    sizes = problem.sizes or problem.named_sizes() or {}
    whole = {n: x for n, x in sizes.items() if isinstance(x, int) and x > 1}
    rows, small = "all", dict[str, int]()
    if problem.flops():
        rows, small = "sample", {n: LARGEST for n, x in whole.items() if x > LARGEST}
    yield JudgedCase("the given call", {}, seed, rows=rows, is_given=True)
    yield JudgedCase("other values", {}, seed + 1, rows=rows, is_given=True)
    for shape in shapes:
        named = " ".join(f"{n}={x}" for n, x in shape.items())
        yield JudgedCase(named, shape, seed + 2, rows=rows, is_given=True)
    for number, (name, size) in enumerate(whole.items()):
        odd = max(1, small.get(name, size) * 3 // 4 - 5)
        yield JudgedCase(f"{name} that does not divide", {**small, name: odd}, seed + 3 + number)
    for number, (name, point) in enumerate(OF_TENSORS.items()):
        yield JudgedCase(name, small, seed + 20 + number, point)


def _tokens(queries: int, keys: int) -> dict[str, int]:
    return {"seq_q": queries, "seq_kv": keys, "causal_offset": keys - queries}
