"""Every execution of a small program with explicit flags: the oracle of the check, and drawn programs.

A core issues in order; pipes execute what is issued to them in order; an access starts and ends, so that accesses of
two pipes may be in progress together. All moves of all pipes are tried in every state.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from npusim.kernels.tilelang.expert import Issued
from npusim.kernels.tilelang.tiles import Box
from npusim.studies.flags.order import MOST_CROSS_SETS

#: issued, completed by pipe, pipes with an access in progress
Core = tuple[int, tuple[tuple[str, int], ...], frozenset[str]]
State = tuple[tuple[Core, ...], frozenset[tuple[object, int]]]


def outcomes(cores: Mapping[str, Sequence[Issued]]) -> set[str]:
    """Return the faults that some execution has: race, lost set, deadlock, left set."""
    names = list(cores)
    start: State = (tuple((0, (), frozenset()) for _ in names), frozenset())
    seen, todo, found = {start}, [start], set[str]()
    while todo:
        state = todo.pop()
        if _has_race(cores, names, state):
            found.add("race")
        moves = list(_moves(cores, names, state, found))
        if not moves:
            is_done = all(
                core[0] == len(cores[n]) and sum(c for _, c in core[1]) == len(cores[n])
                for n, core in zip(names, state[0], strict=True)
            )
            if not is_done:
                found.add("deadlock")
            elif state[1]:
                found.add("left set")
        for move in moves:
            if move not in seen:
                seen.add(move)
                todo.append(move)
    return found


def _running(issued: Sequence[Issued], core: Core) -> Iterator[Issued]:
    done = dict(core[1])
    for pipe in core[2]:
        yield [x for x in issued[: core[0]] if x.pipe == pipe][done.get(pipe, 0)]


def _has_race(cores: Mapping[str, Sequence[Issued]], names: list[str], state: State) -> bool:
    live = [x for n, core in zip(names, state[0], strict=True) for x in _running(cores[n], core)]
    return any(
        a.overlaps(b)
        for i, x in enumerate(live)
        for y in live[:i]
        for a, b in (
            *((a, b) for a in x.writes for b in (*y.reads, *y.writes)),
            *((a, b) for a in x.reads for b in y.writes),
        )
    )


def _moves(cores: Mapping[str, Sequence[Issued]], names: list[str], state: State, found: set[str]) -> Iterator[State]:
    for k, name in enumerate(names):
        issued, (at, completed, live) = cores[name], state[0][k]
        done = dict(completed)

        def changed(core: Core, flags: frozenset[tuple[object, int]], k: int = k) -> State:
            return (*state[0][:k], core, *state[0][k + 1 :]), flags

        if at < len(issued):
            x = issued[at]
            is_idle = sum(done.values()) == at
            if x.pipe == "ALL":
                if is_idle:
                    yield changed((at + 1, _more(done, "ALL"), live), state[1])
            elif x.kind == "cross wait":
                key = ("to", name, x.flag)
                if n := _open(state, key):
                    yield changed((at + 1, _more(done, "S"), live), state[1] - {(key, n)})
            else:
                yield changed((at + 1, completed, live), state[1])
        for pipe in {x.pipe for x in issued[:at]} - {"ALL", "S"}:
            mine = [x for x in issued[:at] if x.pipe == pipe]
            if done.get(pipe, 0) == len(mine):
                continue
            x = mine[done.get(pipe, 0)]
            after = (at, _more(done, pipe), live - {pipe})
            if x.kind == "access":
                yield changed(after if pipe in live else (at, completed, live | {pipe}), state[1])
                continue
            key = ("to", next((n for n in names if n != name), ""), x.flag) if "cross" in x.kind else (name, x.flag)
            if "set" in x.kind:
                if _open(state, key) == (MOST_CROSS_SETS if "cross" in x.kind else 1):
                    found.add("lost set")
                    continue
                yield changed(after, state[1] | {(key, _open(state, key) + 1)})
            elif n := _open(state, key):
                yield changed(after, state[1] - {(key, n)})


def _open(state: State, key: object) -> int:
    """Return how many sets of a flag no wait has ended yet: those of a core have one at most, others count."""
    return sum(flag == key for flag, _ in state[1])


def _more(done: dict[str, int], pipe: str) -> tuple[tuple[str, int], ...]:
    return tuple(sorted({**done, pipe: done.get(pipe, 0) + 1}.items()))


def drawn(seed: int) -> dict[str, list[Issued]]:
    """Return a program: a chain of pipes through buffers of one or two slots; every second one has a flag changed."""
    rng = random.Random(seed)
    tiles, depth = rng.choice([1, 2, 3]), rng.choice([1, 2])
    if rng.random() < 0.3:
        cores = _crossing(rng, tiles)
    else:
        pipes = rng.choice([["MTE2", "V"], ["MTE2", "V", "MTE3"], ["MTE2", "MTE1"]])
        cores = {"C": _chain(rng, pipes, tiles if len(pipes) < 3 else min(tiles, 2), depth)}
    if seed % 2:
        name = rng.choice(list(cores))
        order = [i for i, x in enumerate(cores[name]) if x.kind != "access"]
        if order:
            x = cores[name].pop(rng.choice(order))
            if rng.random() < 0.5:
                cores[name].insert(rng.randrange(len(cores[name]) + 1), x)
    return {n: [_numbered(x, i) for i, x in enumerate(issued)] for n, issued in cores.items()}


def _numbered(x: Issued, line: int) -> Issued:
    return Issued(x.core, x.pipe, x.kind, x.name, line, 1, x.reads, x.writes, x.flag)


def _slot(name: str, slot: int, core: str = "C", space: str = "UB") -> Box:
    return Box(name, space, "" if space == "GM" else core, ((slot, slot + 1), (0, 4)), (4, 1), "float32")


def _access(core: str, pipe: str, reads: tuple[Box, ...], writes: tuple[Box, ...]) -> Issued:
    return Issued(core, pipe, "access", "access", 0, 1, reads, writes)


def _flag(core: str, kind: str, a: str, b: str, number: int) -> Issued:
    pipe = a if kind == "set" else b
    return Issued(core, pipe, kind, kind, 0, 1, flag=(a, b, number))  # type: ignore[arg-type]


def _chain(rng: random.Random, pipes: list[str], tiles: int, depth: int) -> list[Issued]:
    """Each pipe reads the buffer that the pipe before it writes; flags both ways, or barriers."""
    links, issued = list(pairwise(pipes)), list[Issued]()
    has_barriers = rng.random() < 0.25
    used = range(min(depth, tiles)) if rng.random() < 0.9 else range(depth)
    if not has_barriers:
        issued += [_flag("C", "set", b, a, s) for a, b in links for s in used]
    for t in range(tiles):
        s = t % depth
        for n, pipe in enumerate(pipes):
            if has_barriers:
                issued.append(Issued("C", "ALL", "barrier", "barrier_all", 0, 1))
            elif n:
                issued.append(_flag("C", "wait", pipes[n - 1], pipe, s))
            if n + 1 < len(pipes) and not has_barriers:
                issued.append(_flag("C", "wait", pipes[n + 1], pipe, s))
            reads = (_slot(f"b{n - 1}", s),) if n else ()
            writes = (_slot(f"b{n}", s),) if n + 1 < len(pipes) else ()
            issued.append(_access("C", pipe, reads, writes))
            if not has_barriers:
                issued += [_flag("C", "set", pipe, pipes[n - 1], s)] if n else []
                issued += [_flag("C", "set", pipe, pipes[n + 1], s)] if n + 1 < len(pipes) else []
    if not has_barriers:
        issued += [_flag("C", "wait", b, a, s) for a, b in links for s in used]
    return issued


def _crossing(rng: random.Random, tiles: int) -> dict[str, list[Issued]]:
    """The matrix core writes a workspace of one slot, a vector core reads it; flags both ways."""
    slot = _slot("w", 0, space="GM")

    def cross(core: str, kind: str, pipe: str, number: int) -> Issued:
        return Issued(core, pipe, kind, kind, 0, 1, flag=("cross", number))  # type: ignore[arg-type]

    is_free_first = rng.random() < 0.5
    c, v = list[Issued](), list[Issued]()
    for t in range(tiles):
        if is_free_first or t:
            c.append(cross("C", "cross wait", "S", 1))
        c += [_access("C", "FIX", (), (slot,)), cross("C", "cross set", "FIX", 0)]
        v += [cross("V0", "cross wait", "S", 0), _access("V0", "MTE2", (slot,), ())]
        if is_free_first or t + 1 < tiles:
            v.append(cross("V0", "cross set", "MTE2", 1))
    if is_free_first:
        v.insert(0, cross("V0", "cross set", "MTE2", 1))
        c.append(cross("C", "cross wait", "S", 1))
    return {"C": c, "V0": v}
