"""Calls that contain the same sequence in other ways: in other batches, in other pages, with some queries at a time.

Kernels of plain tensors have such calls by the sizes that their schedule's ``grows`` names.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from npusim.config.head_scores import GivenBias, bias_row
from npusim.program.numerics.input_tensors import Array, drawn_pages, paged
from npusim.simulation.variants import Variant

if TYPE_CHECKING:
    from npusim.config.problem import AnyProblem, Problem
    from npusim.program.ir.tile_program import TileProgram
    from npusim.program.numerics.executor import HeadSource

#: Tested sizes: sequences of a batch, keys of a page, queries of a speculated step, and queries of a prompt's chunk
#: that runs next to a decoding step.
BATCHES, PAGES, SPECULATED, PROMPT = (2, 8), (16, 64, 256), (2, 16), 512
#: Numbers of devices that share the heads of a call.
RANKS = (2, 4)
#: Sizes of groups of heads that share something, by name.
SHARED = ("kv_heads", "groups")


@dataclass(frozen=True)
class VariedCall:
    """A varied call, and the position of its sequence in the batch.

    ``is_last_query``: the call also has other queries, so that only the last query's row is compared.  ``is_longer``:
    further tokens follow; they add steps only to other rows.
    """

    what: str
    variant: Variant
    position: int = 0
    is_last_query: bool = False
    is_longer: bool = False


def batches(problem: Problem, sequence: int) -> list[VariedCall]:
    """Return calls with other sequences in the batch."""
    if not problem.lengths:
        return _larger("batch", problem.batch)
    sequences = tuple(zip(problem.lengths, problem.queries, strict=True))
    longest, queries = max(sequences)
    companies = {f"a batch of {n} times these lengths": sequences * n for n in BATCHES}
    companies[f"a neighbour of {2 * longest} keys"] = (*sequences, (2 * longest, queries))
    calls = [VariedCall(what, _of_sequences(problem, one), sequence) for what, one in companies.items()]
    if len(sequences) > 1:
        calls.append(VariedCall("alone", _of_sequences(problem, sequences[sequence : sequence + 1])))
    return calls


def positions(problem: Problem, sequence: int) -> list[VariedCall]:
    """Return calls with a sequence at other positions of the batch."""
    if not problem.lengths:
        return _places(problem.batch)
    others = list(zip(problem.lengths, problem.queries, strict=True))
    own, count = others.pop(sequence), problem.batch
    places = [n for n in range(count) if n != sequence]
    ends = dict.fromkeys((*places[:1], *places[-1:]))
    calls = ((n, _of_sequences(problem, (*others[:n], own, *others[n:]))) for n in ends)
    return [VariedCall(f"sequence {n} of {count}", variant, n) for n, variant in calls]


def pages(problem: Problem, sequence: int) -> list[VariedCall]:
    """Return calls with pages of other sizes, in another order, and without pages."""
    calls = [VariedCall(f"page={n}", Variant(problem={"page": n}), sequence) for n in PAGES if n != problem.page]
    if problem.page:
        order = Variant(problem={"page_seed": problem.page_seed + 1})
        calls.insert(0, VariedCall("pages in another order", order, sequence))
        calls.append(VariedCall("no pages", Variant(problem={"page": 0}), sequence))
    return calls


def chunks(problem: Problem, sequence: int) -> list[VariedCall]:
    """Return calls that divide the queries differently: speculated tokens, halves of a prompt."""
    queries = problem.queries[sequence]
    counts = SPECULATED if queries == 1 else (queries // 2, queries // 4)
    return [_queries(problem, n, sequence) for n in counts if 1 < n <= problem.keys[sequence]]


def prefills(problem: Problem, sequence: int) -> list[VariedCall]:
    """Return a call of a prompt's last queries in place of a decoding step, or the reverse; and a call with both."""
    calls = [_queries(problem, min(PROMPT, problem.keys[sequence]) if problem.queries[sequence] == 1 else 1, sequence)]
    if problem.lengths and problem.queries[sequence] == 1:
        sequences = (*zip(problem.lengths, problem.queries, strict=True), (PROMPT, PROMPT))
        calls.append(VariedCall(f"a prompt of {PROMPT} in its batch", _of_sequences(problem, sequences), sequence))
    return calls


def _larger(name: str, size: int, more: int = 0) -> list[VariedCall]:
    """Return calls with a size multiplied by some factors and, if ``more`` is not 0, increased by this number."""
    sizes = (*((size + more,) if more else ()), *(n * size for n in BATCHES))
    return [VariedCall(f"{name}={n}", Variant(problem={name: n})) for n in sizes]


def _places(batch: int) -> list[VariedCall]:
    largest = BATCHES[-1] * batch
    variant = Variant(problem={"batch": largest})
    return [VariedCall(f"sequence {n} of {largest}", variant, n) for n in (1, largest - 1)]


def plain_calls(sizes: Mapping[str, int], grows: Collection[str]) -> dict[str, list[VariedCall]]:
    """Return, by aspect, the varied calls of a kernel of plain tensors: those in which a size of ``grows`` differs."""
    calls: dict[str, list[VariedCall]] = {}
    if "batch" in grows:
        calls |= {"batch": _larger("batch", sizes["batch"]), "position": _places(sizes["batch"])}
    if "tokens" in grows:
        calls["length"] = [replace(call, is_longer=True) for call in _larger("tokens", sizes["tokens"], 1)]
    if "heads" in grows:
        calls["ranks"] = [*shares(sizes)]
    return calls


def shares(sizes: Mapping[str, int], sequence: int = 0) -> Iterator[VariedCall]:
    """Yield shares of the heads: complete groups, or, if several ranks share a group, a part of it."""
    of_groups = next((name for name in SHARED if sizes.get(name)), "heads")
    all_heads, all_groups = sizes["heads"], sizes[of_groups]
    for ranks in RANKS:
        heads, groups = all_heads // ranks, max(1, all_groups // ranks)
        if all_heads % ranks == 0 and heads % groups == 0 and heads // groups <= all_heads // all_groups:
            variant = Variant(problem={of_groups: groups, "heads": heads})
            yield VariedCall(f"tensor_parallel={ranks}", variant, sequence)


def _queries(problem: Problem, count: int, sequence: int) -> VariedCall:
    update = {"seq_q": count, "query_lengths": (), "causal_offset": problem.seq_kv - count}
    what = "one query (decoding)" if count == 1 else f"the last {count} queries at once"
    return VariedCall(what, Variant(problem=update), sequence, is_last_query=True)


def _of_sequences(problem: Problem, sequences: Sequence[tuple[int, int]]) -> Variant:
    lengths, queries = (tuple(part) for part in zip(*sequences, strict=True))
    longest = {"seq_q": max(queries), "seq_kv": max(lengths), "causal_offset": max(lengths) - max(queries)}
    is_mixed = queries != tuple(min(max(queries), n) for n in lengths)
    return Variant(
        problem={"lengths": lengths, "query_lengths": queries if is_mixed else (), "batch": len(lengths), **longest}
    )


def with_bias_of_one_row(problem: AnyProblem) -> AnyProblem:
    """Return the problem whose drawn bias adds the same values to all queries of a head; the problem itself if it has
    no bias.

    Rows of a bias count from a call's first query: with other queries before it, a query would have another row.
    """
    attention = problem.attention
    if attention is None or attention.bias is None:
        return problem
    heads = attention.heads if attention.bias == "head" else 1
    rows = [[bias_row(head, 0, attention.seq_kv)] for head in range(heads)]
    return problem.with_bias(GivenBias(np.array(rows), "drawn, one row"))


def inputs_of(source: HeadSource, sequence: int, problem: Problem) -> HeadSource:
    """Return the inputs of a varied call in which every sequence is the examined one; queries before the first examined
    query are repeated.
    """

    def read(name: str, batch: int, head: int) -> Array:
        values = source(name, sequence, head)
        if name != "q":
            return values
        rows = problem.queries[batch]
        more = max(0, rows - len(values))
        return np.concatenate([np.resize(values, (more, values.shape[1])), values])[-rows:] if more else values[-rows:]

    return paged(read, problem, drawn_pages(problem)) if problem.page else read


@dataclass(frozen=True)
class _OfFirst:
    """Values of a constant tensor, by batch and head: each sequence has the same ``each`` batches as the first one."""

    values: Callable[[], Any]
    each: int

    def __getitem__(self, at: tuple[int, int]) -> Any:
        return self.values()[at[0] % self.each, at[1]]


def alike(program: TileProgram) -> TileProgram:
    """Return a program of plain tensors in which every sequence has the constants of the first one."""
    count, constants = program.tensors["o"].batch, dict[str, Any]()
    for n, values in program.constants.items():
        batch = program.tensors[n].batch
        constants[n] = partial(_OfFirst, values, batch if batch % count else batch // count)
    return replace(program, constants=constants)


def structural_difference(one: Any, two: Any) -> str:
    """Return where the steps of a row (`row_key`) diverge in two programs, and how often each of the two runs the first
    step that differs.
    """
    for number, (block, other) in enumerate(zip(one, two, strict=False)):
        counterparts = dict(other)
        for label, steps in block:
            others = counterparts.get(label, ())
            if others != steps:
                how = f"{len(steps)} times | {len(others)}" if len(steps) != len(others) else "on other columns"
                return f"block {number} of the row, {label}: {how}"
    return f"{len(list(one))} blocks of the row | {len(list(two))}"
