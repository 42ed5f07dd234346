"""From what was read of a kernel to a phase: its kernel of tiles, blocks of the grid, tensors and masks."""

from __future__ import annotations

import ast
from dataclasses import replace
from functools import lru_cache
from math import inf, prod
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from npusim.algorithms import language
from npusim.algorithms.blocks import MASKED
from npusim.algorithms.flash import with_finite_starts
from npusim.algorithms.lowering import Kernel
from npusim.algorithms.phase import TileRun, WorkTile
from npusim.algorithms.tiling_mask import mask_of
from npusim.config.seen import KeyFunction, KeyRanges
from npusim.errors import ProgramError
from npusim.ir.tile import GlobalTensor
from npusim.ttir.reader import LANGUAGE
from npusim.ttir.text import FORMATS
from npusim.ttir.values import RELATIONS, Tensor

if TYPE_CHECKING:
    from npusim.algorithms.phase import Phase
    from npusim.algorithms.tiling_mask import MaskKind
    from npusim.config.problem import Problem
    from npusim.config.seen import Seen
    from npusim.ttir.reader import Load, Reader
    from npusim.ttir.text import Line
    from npusim.ttir.values import Integers

#: A comparison with 0 of ``base + a row + b key``: relation, base, a, b.
Rule = tuple[str, int, int, int]


class Written(NamedTuple):
    """A kernel of tiles as text: axes of its operands, and the lines of the user's kernel that its own are from."""

    name: str
    file: str
    source: str
    axes: tuple[tuple[str, str], ...]
    lines: tuple[int, ...]


@lru_cache(maxsize=256)
def kernel_of(written: Written) -> Kernel:
    """Return the kernel of a text; its faults are said at the lines of the user's kernel."""
    tree = ast.parse(written.source)
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt | ast.expr | ast.arg):
            node.lineno = node.end_lineno = written.lines[min(node.lineno, len(written.lines)) - 1]
    names: dict[str, Any] = {"inf": inf, **{n: getattr(language, n) for n in LANGUAGE}}
    exec(compile(tree, written.file, "exec"), names)
    return Kernel(names[written.name], "out", dict(written.axes))


class LaunchGrid:
    """The blocks of a launch, by what its programs read and write."""

    def __init__(self, reader: Reader) -> None:
        self.reader, self.stored, ids = reader, reader.stored[0], reader.ids
        counts = [np.arange(w.most)[None] < w.counts for w in reader.walks] or [np.ones((len(ids), 1), bool)]
        self.is_visited = np.concatenate(counts, 1)  # of each program's iterations, loop after loop
        self.out = self._tensor(self.stored.pointer.of)
        self.names = self._names()
        self.sizes = {"row": min(self.stored.pointer.shape[0], self.out.shape[2])}
        self.walk: tuple[Integers, Integers] | None = None
        places = self.out.places(self.stored.pointer.base)
        self.batch, self.head, self.row, col = (np.broadcast_to(x, (len(ids), 1)) for x in places)
        rows, cols = (np.broadcast_to(x, (len(ids), 1)) for x in self.stored.left)
        self.rows = np.minimum(rows, self.out.shape[2] - self.row)
        if np.any(col) or np.any(cols < self.out.shape[3]):
            raise self._fault(
                self.stored.line, f"{self.out.name}: a grid over columns of the result: rows alone are cut"
            )
        for load in reader.loads.values():
            self._place(load)

    def _tensor(self, of: str) -> Tensor:
        tensor: Tensor = self.reader.arguments[of]
        return tensor

    @staticmethod
    def _fault(line: Line, why: str) -> ProgramError:
        return ProgramError(f"{line}: {why}")

    def _names(self) -> dict[str | None, str]:
        """Return what axes are called: the row's, what the loop walks, those of operands."""
        root, loads = self.reader.root, self.reader.loads.values()
        names: dict[str | None, str] = {root(self.stored.value.axes[0]): "row"}
        for load in loads:
            if load.is_walked:
                names.setdefault(root(load.axes[self._along(load)]), "key")
        pools = [(self.stored.value.axes, ["value"]), *((x.axes, ["head", "depth", "width"]) for x in loads)]
        for axes, pool in pools:
            for axis in filter(None, map(root, axes)):
                if axis not in names:
                    names[axis] = next(n for n in pool if n not in names.values())
        return names

    def called(self, axes: tuple[str | None, ...]) -> str:
        """Return the names of axes, none for those of size 1."""
        return " ".join(self.names[self.reader.root(a)] for a in axes if a is not None)

    def _along(self, load: Load) -> int:
        """Return the dimension of a walked block along which it moves."""
        places = self._tensor(load.of).places(load.pointer.base)[2:]
        moves = [bool(np.any(np.diff(x, axis=1))) for x in places]
        if moves[0] == moves[1]:
            which = "both" if moves[0] else "neither"
            raise self._fault(load.line, f"{load.of} moves along {which} of its axes in the loop")
        return int(moves[1] if self._turn(load) == 1 else moves[0])

    def _turn(self, load: Load) -> int:
        """Return 1 where the first axis of a block is the tensor's rows, -1 where it is its columns."""
        steps = self._tensor(load.of).steps
        return 1 if load.pointer.steps[-1] == steps[3] or load.pointer.shape[-1] == 1 else -1

    def _place(self, load: Load) -> None:
        """Hold a block against the tensor it is read from, the grid's and the other operands'."""
        tensor, turn = self._tensor(load.of), self._turn(load)
        shape = self.is_visited.shape if load.is_walked else (len(self.reader.ids), 1)
        is_visited = self.is_visited if load.is_walked else np.ones(shape, bool)
        batch, head, *corner = (np.broadcast_to(x, shape) for x in tensor.places(load.pointer.base))
        group = self.out.shape[1] // tensor.shape[1]
        if np.any(((batch != self.batch) | (head != self.head // group))[is_visited]) and tensor.shape[:2] != (1, 1):
            raise self._fault(load.line, f"{load.of}: a program reads another head than head // {group} of its own")
        for i, (at, whole) in enumerate(zip(corner, tensor.shape[2:], strict=True)):
            size = load.pointer.shape[::turn][i]
            count = np.minimum(np.broadcast_to(load.left[::turn][i], shape), size)
            called = self.called((load.axes[::turn][i],))
            self._check_end(load, called or "element", np.where(is_visited, at + count, 0), whole)
            if called == "key" and load.is_walked:
                known, self.walk = self.walk or (at, count), (at, count)
                self.sizes["key"] = size
                if any(np.any((a != b)[is_visited]) for a, b in zip(known, self.walk, strict=True)):
                    raise self._fault(load.line, f"{load.of} is walked at other places than the operand before it")
            elif called == "row":
                if np.any(at != self.row):
                    raise self._fault(load.line, f"{load.of}: rows other than those that the program stores")
            elif called:
                self.sizes[called] = min(size, whole)
                if np.any(at[is_visited]) or np.any(count < whole):
                    raise self._fault(load.line, f"{load.of}: {int(count.max())} of {whole} {called}s: a tile has all")

    def _check_end(self, load: Load, called: str, end: Integers, whole: int) -> None:
        """Raise `ProgramError` for a program that reads beyond a tensor."""
        if np.any(end > whole):
            program = int(np.flatnonzero((end > whole).any(axis=1))[0])
            ids = ", ".join(map(str, self.reader.ids[program]))
            why = f"program ({ids}) reads up to {called} {int(end[program].max()) - 1} of {whole}, and no mask keeps it"
            raise self._fault(load.line, f"{load.of}: {why} from that: mask=... of tl.load, or sizes that divide")

    # ---------------------------------------------------------------- what comes out

    def written(self) -> Written:
        """Return the kernel of tiles as text."""
        r, lines = self.reader, list[tuple[str, int]]()
        names = {x.name: x.name.removesuffix("j") if x.is_walked else x.name for x in r.loads.values()}
        axes = {names[x.name]: self.called(x.axes[:: self._turn(x)]) for x in r.loads.values()}
        axes |= {"mask": "row key"} if any(w.masks for w in r.walks) else {}
        lines.append((f"def {r.function.name}({', '.join([*axes, *r.numbers])}):", self.stored.line.number))
        lines += [(f"    {text}", line.number) for text, line in r.lines[: r.loop_at]]
        walked = [n for n, x in r.loads.items() if x.is_walked]
        if walked:
            at = r.walks[0].lines[0][1].number
            for name, (start, of, fmt) in r.states.items():
                lines.append((f"    {name} = full({self.called(of)!r}, {start.text}, {FORMATS[fmt]!r})", at))
            lines.append(
                (f"    for {', '.join(walked)} in tiles({', '.join(names[n] for n in walked)}, axis='key'):", at)
            )
            lines += [(f"        {text}", line.number) for text, line in r.walks[0].lines]
        lines += [(f"    {text}", line.number) for text, line in r.lines[r.loop_at :]]
        lines.append((f"    return {r.text(self.stored.value)}", self.stored.line.number))
        source, numbers = "\n".join(text for text, _ in lines), tuple(n for _, n in lines)
        return Written(r.function.name, self.stored.line.file, source, tuple(axes.items()), numbers)

    def phase(self, problem: Problem, kind: MaskKind | None, p: object) -> Phase:
        """Return the phase; ``kind``: how tiles get their masks; ``p``: a precision, with the order of row sums."""
        r, written = self.reader, self.written()
        bound: dict[str, Any] = {
            n: self._global(x.of) for (n, _), x in zip(written.axes, r.loads.values(), strict=False)
        }
        is_masked = any(w.masks for w in r.walks)
        seen = self._seen(problem) if is_masked else KeyRanges(problem.seq_kv)
        if is_masked:
            bound["mask"] = mask_of(problem, (self.sizes["row"], self.sizes["key"]), kind, seen=seen)
        if seen != problem.seen:
            r.notes.append(
                f"{r.function.name}: which keys a query sees is what its masks say, not what the problem does"
            )
        cells, out = self._cells(problem.causal_offset if is_masked else None), self._global(self.stored.pointer.of)
        bound |= {"p": p, **r.numbers}
        phase = kernel_of(written).phase(r.function.name, cells, self.sizes, [out], **bound)
        phase = with_finite_starts(phase) if is_masked else phase
        return replace(phase, notes=tuple(dict.fromkeys(r.notes)))

    def _global(self, of: str) -> GlobalTensor:
        t, role = self._tensor(of), cast("Any", self._tensor(of).role)
        return GlobalTensor(t.name, *t.shape, t.fmt, role, t.is_interleaved, is_transposed=t.is_transposed)

    def _seen(self, problem: Problem) -> Seen:
        """Return which keys a query sees by the kernel's masks."""
        assert self.walk is not None
        at, masks = 0, list[set[Rule]]()
        for walk in self.reader.walks:
            here = slice(at, at := at + walk.most)
            rules = set[Rule]()
            for relation, d in walk.masks:
                base = d.base - d.steps[0] * self.row - d.steps[1] * self.walk[0][:, here]
                if len(every := np.unique(base[self.is_visited[:, here]])) > 1:
                    raise self._fault(self.stored.line, "a mask whose diagonal moves between tiles or programs")
                rules.add((relation, int(every[0]), d.steps[0], d.steps[1]))
            masks += [rules] if rules else []
        if any(other != masks[0] for other in masks):
            raise self._fault(self.stored.line, "two loops with masks that differ")
        return seen_of(tuple(sorted(masks[0])), problem)

    def _cells(self, offset: int | None) -> tuple[WorkTile, ...]:
        """Return the blocks; raise `ProgramError` where programs write a row twice, or leave some unwritten."""
        kinds, cells = dict[tuple[TileRun, ...], tuple[TileRun, ...]](), list[WorkTile]()
        for i in np.flatnonzero(self.rows[:, 0] > 0):
            runs = self._runs(int(i))
            span = ("row", int(self.row[i, 0]), int(self.rows[i, 0]))
            place = int(self.batch[i, 0]), int(self.head[i, 0])
            cells.append(WorkTile(*place, (span,), kinds.setdefault(runs, runs), offset))
        written, whole = sum(c.rows for c in cells), prod(self.out.shape[:3])
        is_twice = len({(c.batch, c.head, c.row) for c in cells}) < len(cells) or written > whole
        if is_twice or written < whole:
            how = "some of them more than once" if is_twice else f"{whole - written} of them never"
            grid = "x".join(map(str, self.reader.grid))
            why = f"{self.stored.pointer.of}: the grid of {grid} programs writes {written} of {whole}"
            raise self._fault(self.stored.line, f"{why} rows, {how}: the grid, or a program's offsets")
        return tuple(cells)

    def _runs(self, i: int) -> tuple[TileRun, ...]:
        """Return the tiles that a program visits, those of one shape and evenly spaced together."""
        runs, only = (
            list[TileRun](),
            [MASKED if w.masks else frozenset() for w in self.reader.walks for _ in range(w.most)],
        )
        for j in np.flatnonzero(self.is_visited[i]) if self.walk else ():
            assert self.walk is not None
            col, cols = int(self.walk[0][i, j]), int(self.walk[1][i, j])
            last = runs[-1] if runs else None
            apart = col - last.col - (last.count - 1) * last.step if last else 0
            if last and (last.cols, last.only) == (cols, only[j]) and (last.count == 1 or last.step == apart):
                runs[-1] = replace(last, count=last.count + 1, step=apart)
            else:
                runs.append(TileRun(col, cols, 1, max(cols, 1), only[j]))
        return tuple(runs)


@lru_cache(maxsize=64)
def seen_of(rules: tuple[Rule, ...], problem: Problem) -> Seen:
    """Return which keys a query sees by comparisons ``base + a row + b key`` with 0."""
    offset, ranges = problem.causal_offset, dict[str, int]()
    for relation, base, a, b in rules:
        if (a, b) == (1, -1) and relation in ("sge", "sgt") and base - (relation == "sgt") == offset:
            ranges["after"] = 0
        elif (a, b) == (1, -1) and relation in ("slt", "sle"):
            ranges["window"] = offset - base + (relation == "sle")
    if len(ranges) == len(rules) and "after" in ranges:
        window = ranges.get("window")
        return KeyRanges(problem.seq_kv, 0, None if window is None or window >= problem.seq_kv else window)

    def sees(q: Any, k: Any) -> Any:
        return np.logical_and.reduce([RELATIONS[r](base + a * (q - offset) + b * k, 0) for r, base, a, b in rules])

    return KeyFunction(sees, problem.seq_kv)
