"""From what was read of a kernel to a phase: its kernel of tiles, blocks of the grid, tensors and masks."""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf, prod
from typing import TYPE_CHECKING, Any, cast

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
from npusim.ttir.text import FORMATS
from npusim.ttir.values import RELATIONS, Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from npusim.algorithms.phase import Phase
    from npusim.algorithms.tiling_mask import MaskKind
    from npusim.config.problem import Problem
    from npusim.config.seen import Seen
    from npusim.ttir.reader import Load, Reader, Store
    from npusim.ttir.values import Integers

ROW = "row"
#: A comparison with 0 of ``base + a row + b key``: relation, base, a, b.
Rule = tuple[str, int, int, int]


@dataclass(frozen=True)
class Written:
    """A kernel of tiles as text: axes of its operands, and the lines of the user's kernel that its own are from."""

    name: str
    file: str
    source: str
    axes: tuple[tuple[str, str], ...]
    results: str
    lines: tuple[int, ...]


@lru_cache(maxsize=256)
def kernel_of(written: Written) -> Kernel:
    """Return the kernel of a text; its faults are said at the lines of the user's kernel."""
    tree = ast.parse(written.source)
    for node in ast.walk(tree):
        if hasattr(node, "lineno"):
            located: Any = node
            located.lineno = located.end_lineno = written.lines[min(located.lineno, len(written.lines)) - 1]
    words = ("exp", "log", "tanh", "maximum", "where", "tiles", "full", "fma")
    names: dict[str, Any] = {"inf": inf, **{n: getattr(language, n) for n in words}}
    exec(compile(tree, written.file, "exec"), names)
    return Kernel(names[written.name], written.results, dict(written.axes))


class Grid:
    """The blocks of a launch, by what its programs read and write."""

    def __init__(self, reader: Reader) -> None:
        self.reader, self.store = reader, reader.stores[-1]
        self.out = cast("Tensor", reader.arguments[self.store.pointer.of])
        self.counts = sum((w.counts for w in reader.walks), np.zeros((len(reader.ids), 1), np.int64))
        self.walked = [x for x in reader.loads.values() if x.is_walked]
        self.fixed = [x for x in reader.loads.values() if not x.is_walked]
        self.names = self._names()
        self.sizes: dict[str, int] = {}
        self.walk: tuple[Integers, Integers] | None = None
        places = self.out.places(self.store.pointer.base)
        count = len(reader.ids)
        self.batch, self.head, self.row, self.col = (np.broadcast_to(x, (count, 1))[:, 0] for x in places)
        height, width = (
            self.store.pointer.shape[-2:] if len(self.store.pointer.shape) > 1 else (self.store.pointer.shape[0], 1)
        )
        self.rows = np.minimum(
            np.broadcast_to(self._left(self.store, 0), (count, 1))[:, 0], self.out.shape[2] - self.row
        )
        self.cols = np.minimum(
            np.broadcast_to(self._left(self.store, -1), (count, 1))[:, 0], self.out.shape[3] - self.col
        )
        self.sizes[ROW] = min(height, self.out.shape[2])
        self.column = self.called(self.store.value.axes[-1]) if len(self.store.value.axes) > 1 else ""
        if self.column:
            self.sizes[self.column] = min(width, self.out.shape[3])
        self.has_columns = bool(self.column and (np.any(self.col) or np.any(self.cols < self.out.shape[3])))
        for load in reader.loads.values():
            self._place(load)

    @staticmethod
    def _left(store: Store, axis: int) -> Integers:
        return store.left[axis]

    def _names(self) -> dict[str | None, str]:
        """Return what axes are called: the row's, what the loop walks, those of operands."""
        r = self.reader
        names: dict[str | None, str] = {r.root(self.store.value.axes[0]): ROW}
        for load in self.walked:
            along = self._along(load)
            names.setdefault(r.root(load.axes[along]), "key")
        pools = [
            (self.store.value.axes, ("value", "column")),
            *((x.axes, ("head", *(f"axis{i}" for i in range(9)))) for x in r.loads.values()),
        ]
        for axes, pool in pools:
            for axis in map(r.root, axes):
                if axis is not None and axis not in names:
                    names[axis] = next(n for n in pool if n not in names.values())
        return names

    def called(self, axis: str | None) -> str:
        """Return the name of an axis; empty for one of size 1."""
        return "" if axis is None else self.names[self.reader.root(axis)]

    def _along(self, load: Load) -> int:
        """Return the dimension of a walked block along which it moves."""
        tensor = cast("Tensor", self.reader.arguments[load.of])
        moves = [bool(np.any(np.diff(x, axis=1))) for x in tensor.places(self._valid(load.pointer.base))[2:]]
        if moves[0] == moves[1] and self.counts.max() > 1:
            raise ProgramError(
                f"{load.line}: {load.of} moves along {'both' if moves[0] else 'neither'} of its axes in the loop"
            )
        is_column = moves[1]
        return int(is_column) if self._is_upright(load) else int(not is_column)

    def _is_upright(self, load: Load) -> bool:
        """Return whether the first axis of a block is the tensor's rows."""
        tensor = cast("Tensor", self.reader.arguments[load.of])
        return len(load.axes) < 2 or load.pointer.steps[-1] == tensor.steps[3] or load.pointer.shape[-1] == 1

    def _valid(self, base: Integers) -> Integers:
        """Return a base for all iterations, those beyond a program's last one as its last."""
        columns = [
            self._of_walk(
                base[:, sum(int(v.counts.max()) for v in self.reader.walks[:i]) :] if base.shape[1] > 1 else base,
                w.counts,
            )
            for i, w in enumerate(self.reader.walks)
        ]
        if not columns:
            return np.broadcast_to(base, (len(self.reader.ids), 1))
        whole = np.concatenate(columns, 1)
        keep = np.concatenate([np.arange(int(w.counts.max()))[None] < w.counts for w in self.reader.walks], 1)
        order = np.argsort(~keep, axis=1, kind="stable")
        packed = np.take_along_axis(whole, order, 1)
        last = np.maximum(self.counts - 1, 0)
        times = np.minimum(np.arange(int(self.counts.max()))[None], last)
        return np.take_along_axis(packed, times, 1)

    def _of_walk(self, base: Integers, counts: Integers) -> Integers:
        most = int(counts.max())
        base = base[:, :most] if base.shape[1] > 1 else base
        return np.broadcast_to(base, (len(self.reader.ids), most))

    def _place(self, load: Load) -> None:
        """Hold a block against the tensor it is read from, the grid's and the other operands'."""
        tensor = cast("Tensor", self.reader.arguments[load.of])
        bases = tensor.places(
            self._valid(load.pointer.base)
            if load.is_walked
            else np.broadcast_to(load.pointer.base[:, :1], (len(self.reader.ids), 1))
        )
        batch, head, *corner = bases
        if load.is_walked and self.walk is None:
            self.columns = tensor.places(load.pointer.base)[2 + (self._along(load) != int(not self._is_upright(load)))]
        if tensor.shape[1] > 1 or tensor.shape[0] > 1:
            group = self.out.shape[1] // tensor.shape[1] or 1
            if np.any(batch != self.batch[:, None]) or np.any(head != self.head[:, None] // group):
                raise ProgramError(
                    f"{load.line}: {load.of}: a program reads another head than head // {group} of its own"
                )
        upright = self._is_upright(load)
        turn = 1 if upright else -1
        axes, shape, left = load.axes[::turn], load.pointer.shape[::turn], load.left[::turn]
        if len(axes) == 1:
            axes, shape, left = (None, *axes), (1, *shape), [np.ones((1, 1), np.int64), *left]
        for i, (axis, at, whole) in enumerate(zip(axes, corner, tensor.shape[2:], strict=True)):
            self._along_axis(load, self.called(axis), (shape[i], left[i]), at, whole)

    def _along_axis(self, load: Load, called: str, size: tuple[int, Integers], at: Integers, whole: int) -> None:
        count = np.broadcast_to(self._valid(size[1]) if load.is_walked else size[1], at.shape)
        if np.any(at + np.minimum(count, size[0]) > whole):
            program = int(np.flatnonzero((at + count > whole).any(axis=1))[0])
            ids = ", ".join(map(str, self.reader.ids[program]))
            first = int((at + count)[program].max())
            raise ProgramError(
                f"{load.line}: {load.of}: program ({ids}) reads up to {called or 'element'} {first - 1} of {whole}, "
                "and no mask keeps it from that: mask=... of tl.load, or sizes that divide"
            )
        count = np.minimum(count, whole - at)
        if called == "key" and load.is_walked:
            if self.walk is not None and (np.any(self.walk[0] != at) or np.any(self.walk[1] != count)):
                raise ProgramError(f"{load.line}: {load.of} is walked at other places than the operand before it")
            self.walk, self.sizes["key"] = (at, count), size[0]
        elif called == ROW and np.any(self.row):
            if np.any(at[:, :1] != self.row[:, None]):
                raise ProgramError(f"{load.line}: {load.of}: rows other than those that the program stores")
        elif called and called == self.column:
            if np.any(at[:, :1] != self.col[:, None]):
                raise ProgramError(f"{load.line}: {load.of}: columns other than those that the program stores")
        elif called:
            self.sizes[called] = min(size[0], whole)
            if np.any(at) or np.any(count < min(size[0], whole)) or size[0] < whole:
                raise ProgramError(
                    f"{load.line}: {load.of}: {int(count.max())} of {whole} {called}s; a tile has all of them"
                )

    # ---------------------------------------------------------------- what comes out

    def written(self) -> Written:
        """Return the kernel of tiles as text."""
        r, function = self.reader, self.reader.function
        axes = {x.name: self._axes(x) for x in r.loads.values()}
        lines: list[tuple[str, int]] = []
        names = {x.name: self._parameter(x) for x in r.loads.values()}
        masks = {"mask": f"{ROW} key"} if r.masks else {}
        given = [*names.values(), *masks, *r.numbers]
        first = r.lines[0][1].number if r.lines else 1
        lines.append((f"def {function.name}({', '.join(given)}):", first))
        before, after = r.lines[: r.loop_at], r.lines[r.loop_at :]
        lines += [(f"    {text}", line.number) for text, line in before]
        if r.walks and (r.states or self.walked):
            at_loop = self._loop_line()
            for name, start, of, fmt in r.states:
                called = " ".join(filter(None, map(self.called, of)))
                lines.append((f"    {name} = full({called!r}, {start.text}, {FORMATS[fmt]!r})", at_loop))
            own = [x.name for x in self.walked]
            lines.append(
                (f"    for {', '.join(own)} in tiles({', '.join(names[n] for n in own)}, axis='key'):", at_loop)
            )
            lines += [(f"        {text}", line.number) for text, line in r.walks[0].lines]
        lines += [(f"    {text}", line.number) for text, line in after]
        lines.append((f"    return {r.text(self.store.value)}", self.store.line.number))
        bound = tuple((names[n], a) for n, a in axes.items()) + tuple(masks.items())
        source = "\n".join(text for text, _ in lines) + "\n"
        return Written(function.name, self.store.line.file, source, bound, "out", tuple(n for _, n in lines))

    def _loop_line(self) -> int:
        return min(line.number for _, line in self.reader.walks[0].lines)

    def _axes(self, load: Load) -> str:
        axes = load.axes if self._is_upright(load) else load.axes[::-1]
        called = " ".join(filter(None, map(self.called, axes)))
        return f"{ROW} {called}" if " " not in called and called != ROW else called

    def _parameter(self, load: Load) -> str:
        return load.name.removesuffix("j") if load.is_walked else load.name

    def phase(self, problem: Problem | None, kind: MaskKind | None, p: object) -> Phase:
        """Return the phase; ``kind``: how tiles get their masks; ``p``: a precision, with the order of row sums."""
        r = self.reader
        bound: dict[str, Any] = {self._parameter(x): self._tensor(x) for x in r.loads.values()}
        bound |= r.numbers
        offset = None
        if r.masks:
            assert problem is not None
            seen, offset = self._seen(problem)
            bound["mask"] = mask_of(problem, (self.sizes[ROW], self.sizes["key"]), kind, seen=seen)
        kernel = kernel_of(self.written())
        phase = kernel.phase(
            r.function.name, self._cells(offset), self.sizes, [self._global(self.out, "output")], p=p, **bound
        )
        return replace(with_finite_starts(phase) if r.masks else phase, notes=tuple(dict.fromkeys(r.notes)))

    def _tensor(self, load: Load) -> GlobalTensor:
        tensor = cast("Tensor", self.reader.arguments[load.of])
        made = self._global(tensor, tensor.role)
        if len(load.axes) < 2 and self.called(load.axes[0]) != ROW:  # one row for all
            return replace(made, rows=self.out.shape[2], shared_rows=self.out.shape[2])
        return made

    @staticmethod
    def _global(tensor: Tensor, role: str) -> GlobalTensor:
        kind: Any = role
        return GlobalTensor(
            tensor.name, *tensor.shape, tensor.fmt, kind, tensor.is_interleaved, is_transposed=tensor.is_transposed
        )

    def _seen(self, problem: Problem) -> tuple[Seen, int]:
        """Return which keys a query sees by the kernel's masks, and the offset of queries among keys."""
        assert self.walk is not None
        offset, at, masks = problem.causal_offset, 0, dict[int, set[Rule]]()
        for number, walk in enumerate(self.reader.walks):
            most = int(walk.counts.max())
            is_visited = np.arange(most)[None] < walk.counts
            corner = self.row[:, None], np.broadcast_to(self.columns, (len(self.row), self.columns.shape[1]))
            for mask, of, line in self.reader.masks:
                for relation, d in mask.of if of is walk else ():
                    base = d.base - d.steps[0] * corner[0] - d.steps[1] * corner[1][:, at : at + most]
                    if len(every := np.unique(base[is_visited])) > 1:
                        raise ProgramError(f"{line}: a mask whose diagonal moves between tiles or programs")
                    masks.setdefault(number, set()).add((relation, int(every[0]), d.steps[0], d.steps[1]))
            at += most
        first, *others = masks.values()
        if any(other != first for other in others):
            raise ProgramError(f"{self.reader.masks[1][2]}: a mask other than that of the loop before")
        return seen_of(tuple(sorted(first)), problem, offset), offset

    def _cells(self, offset: int | None) -> tuple[WorkTile, ...]:
        cells, kinds = list[WorkTile](), dict[tuple[TileRun, ...], tuple[TileRun, ...]]()
        masked = self._masked()
        for i in range(len(self.reader.ids)):
            if self.rows[i] <= 0 or (self.has_columns and self.cols[i] <= 0):
                continue
            runs = tuple(self._runs(i, masked)) if self.walk is not None else ()
            spans = [(ROW, int(self.row[i]), int(self.rows[i]))]
            if self.has_columns:
                spans.append((self.column, int(self.col[i]), int(self.cols[i])))
            cells.append(
                WorkTile(int(self.batch[i]), int(self.head[i]), tuple(spans), kinds.setdefault(runs, runs), offset)
            )
        self._check_written(cells)
        return tuple(cells)

    def _masked(self) -> list[tuple[Integers, bool]]:
        return [(w.counts, w.is_masked) for w in self.reader.walks]

    def _runs(self, i: int, masked: list[tuple[Integers, bool]]) -> list[TileRun]:
        assert self.walk is not None
        at, runs = 0, list[TileRun]()
        for counts, is_masked in masked:
            only = MASKED if is_masked else frozenset[str]()
            for j in range(at, at + int(counts[i, 0])):
                col, cols = int(self.walk[0][i, j]), int(self.walk[1][i, j])
                last = runs[-1] if runs else None
                apart = col - last.col - (last.count - 1) * last.step if last else 0
                if last and (last.cols, last.only) == (cols, only) and (last.count == 1 or last.step == apart):
                    runs[-1] = replace(last, count=last.count + 1, step=apart)
                else:  # tiles of one shape, evenly spaced
                    runs.append(TileRun(col, cols, 1, max(cols, 1), only))
            at += int(counts[i, 0])
        return runs

    def _check_written(self, cells: list[WorkTile]) -> None:
        """Raise `ProgramError` where programs write an element twice, or leave some unwritten."""
        spans = {(c.batch, c.head, *(s for _, start, size in c.spans for s in (start, size))) for c in cells}
        written = sum(prod(size for _, _, size in c.spans) for c in cells)
        whole = prod(self.out.shape[:3]) * (self.out.shape[3] if self.has_columns else 1)
        if len(spans) < len(cells) or written != whole:
            what = "elements" if self.has_columns else "rows"
            how = "more than once" if len(spans) < len(cells) or written > whole else f"{whole - written} of them never"
            raise ProgramError(
                f"{self.store.line}: {self.store.pointer.of}: the grid of {'x'.join(map(str, self.reader.grid))} "
                f"programs writes {written} of {whole} {what}, {how}: the grid, or a program's offsets"
            )


@lru_cache(maxsize=64)
def seen_of(rules: tuple[Rule, ...], problem: Problem, offset: int) -> Seen:
    """Return which keys a query sees by comparisons ``base + a row + b key`` with 0."""
    after, before = None, None
    for relation, base, a, b in rules:
        if (a, b) == (1, -1) and relation in ("sge", "sgt") and base - (relation == "sgt") == offset:
            after = 0
        elif (a, b) == (1, -1) and relation in ("slt", "sle"):
            before = -(base - (relation == "sle")) + offset
        else:
            break
    else:
        if after == 0:
            return KeyRanges(problem.seq_kv, 0, before if before is not None and before < problem.seq_kv else None)

    def sees(q: Any, k: Any) -> Any:
        rows = q - offset
        return np.logical_and.reduce([RELATIONS[r](base + a * rows + b * k) for r, base, a, b in rules])

    return KeyFunction(sees, problem.seq_kv)


def tensors_of(arguments: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors among the arguments of a launch."""
    return [x for x in arguments.values() if isinstance(x, Tensor)]
