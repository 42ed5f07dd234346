"""Reads the text of a TileLang-Ascend kernel as statements on tiles, without its package.

A kernel is a Python function whose closure has real values.  Its statements are read one after another; Python
evaluates expressions, in which buffers and numbers of the kernel stand for values.  Sizes, formats and conditions thus
have the values that Python computes, and helper functions of the program are called.  As in TileLang, a name that a
loop or a branch binds is known only inside it.
"""

from __future__ import annotations

import ast
import builtins
import math
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FunctionType

from npusim.errors import NpusimError, ProgramError, SpecError
from npusim.kernels.tilelang.ascend_values import (
    ALIASES,
    TracedBuffer,
    TracedCondition,
    TracedElement,
    TracedValue,
    size_of,
)
from npusim.kernels.tilelang.ascend_words import AscendWords
from npusim.kernels.tilelang.cleared_tiles import with_zeros_before
from npusim.kernels.tilelang.cores_joined import (
    check_places,
    joined_halves,
    one_sequence,
    stored_tensors,
    without_overwritten,
    without_workspaces,
)
from npusim.kernels.tilelang.cores_ordered import ordered_by_workspaces
from npusim.kernels.tilelang.gathered_rows import with_gathered_rows
from npusim.kernels.tilelang.loops import flattened, fused, tasks_of
from npusim.kernels.tilelang.pipelined_loops import without_pipelines
from npusim.kernels.tilelang.program import Language, PrimFunc, SymbolicSize, TensorType
from npusim.kernels.tilelang.rolled_loops import rolled
from npusim.kernels.tilelang.statements import (
    TYPES,
    Applied,
    BoundValue,
    BufferElement,
    BufferPart,
    Conditional,
    CoreScope,
    CrossFlag,
    Elementwise,
    Expression,
    Literal,
    MatrixProduct,
    ParallelNest,
    SerialLoop,
    Statement,
    TileBuffer,
    TileKernel,
    TileReduction,
    Variable,
    expressions_in,
    linear,
    only_assignment,
    parts_of,
    refused,
    simpler,
    substituted,
    variables_of,
    walked,
    written_buffers,
)
from npusim.kernels.tilelang.tile_slots import with_invariant_slots, without_slots
from npusim.kernels.tilelang.tiles import width_of
from npusim.kernels.tilelang.ttir_writer import chosen_value
from npusim.kernels.tilelang.whole_parts import with_whole_parts
from npusim.kernels.triton.ttir_text import Line

_ALL, _ANY, _NOT = "__npusim_all", "__npusim_any", "__npusim_not"
_ZERO = Literal(0)
_LOOPS = frozenset({"serial", "unroll", "Pipelined", "Parallel", "Persistent"})
_ORDER = (
    "the values are those of one order that the flags between cores allow; `npusim check` proves that every "
    "other order gives equal values"
)
_BY_WORKSPACES = (
    "no flag orders the two cores: in each iteration, each read of a workspace is assumed to come after its write"
)
_FLAGS = (
    "flags and barriers change no value; the times are those of npusim's order of tiles on this device, not "
    "those of {words}"
)
_PIPELINE = (
    "loops of a pipeline, whose first stages run some tiles ahead of the last ones, are read as one loop; the timed "
    "program works ahead as npusim's own kernels do"
)
_WHOLE = "a loop over parts of a tile is timed as one instruction on the whole tile"
_TASKS = (
    "npusim does not follow a core's loop over its tasks: each task is a program, and the programs are "
    "distributed to the cores"
)
_SHADOWED = (
    "{line}: {name} has a value before this loop or if; an assignment inside applies only there, as in TileLang's "
    "parser: each iteration begins with the value from before"
)
_VECTOR = (
    "{name} (the number of a vector core) is treated as one more axis of the grid: each vector core's half "
    "is a separate block"
)


@dataclass(frozen=True, slots=True)
class TracedLoop:
    """The range of a loop: its word, bounds, and stages of a pipeline."""

    word: str
    bounds: tuple[object, ...]
    stages: int = 0

    def __iter__(self) -> Iterator[int]:
        """Iterate over numbers of the text, as in a comprehension."""
        if self.word != "range" or any(isinstance(b, TracedValue) for b in self.bounds):
            raise TypeError(f"T.{self.word} occurs in a function that is not a T.macro, or in an expression")
        return iter(range(*self.bounds))  # type: ignore[call-overload]


@dataclass(frozen=True, slots=True)
class TracedLaunch:
    """The grid of ``T.Kernel``."""

    grid: tuple[int, ...]
    has_vector_core: bool


@dataclass(frozen=True, slots=True)
class TracedScope:
    """The core of ``T.Scope``."""

    core: str


def kernel_of(kernel: PrimFunc, language: Language, scalars: Mapping[str, object] = {}) -> TileKernel:
    """Return the statements of a kernel of TileLang-Ascend.

    ``scalars``: values of parameters that are not tensors; other such parameters are numbers of the launch.  Raises
    `NpusimError` with the line of a statement that cannot be read.
    """
    return AscendReader(kernel, scalars).read(language)


class AscendReader:
    """Reads one kernel; ``line`` is the line of the current statement."""

    def __init__(self, kernel: PrimFunc, scalars: Mapping[str, object]) -> None:
        self.kernel, self.scalars = kernel, scalars
        self.line, self.quiet = Line(kernel.path, kernel.line), Counter[str]()
        self.parameters = list[TileBuffer | tuple[str, str]]()
        self.grid: tuple[int, ...] = (1,)
        self.numbers, self.vector = list[str](), ""
        self.stages, self.notes = set[int](), dict[str, None]()
        self.addresses = dict[TracedBuffer, int]()
        self.shared: tuple[Statement, ...] | None = None  # the statements of T.Persistent
        self.names, self.target = dict[str, object](), ""
        self._taken, self._statements = Counter[str](), list[Statement]()
        self._words = AscendWords(self)

    # ------------------------------------------------------------ the kernel
    def read(self, language: Language) -> TileKernel:
        """Return the kernel."""
        function = self.kernel.function
        node = _definition(function)
        self.names = self.with_numbers(_names_of(function))
        for a in node.args.args:
            self.names[a.arg] = self.parameter(a.arg, function.__annotations__.get(a.arg))
        with language.walking(self.word):
            self.body(node.body)
        body = self.joined(tuple(self._statements))
        options = {"num_warps": 4, "num_stages": max(self.stages, default=1)}
        grid, numbers, used = self.grid, tuple(self.numbers), variables_of(expressions_in(body))
        written_to = {b.name for s in walked(body) if isinstance(s, ParallelNest) for b in stored_tensors(s)}
        is_left = self.kernel.workspace_names - written_to - {b.name for b in tensors_read(body)}
        self.parameters = [p for p in self.parameters if not isinstance(p, TileBuffer) or p.name not in is_left]
        if self.vector in used:
            grid, numbers = (*grid, 2), (*numbers, self.vector)
            self.notes[_VECTOR.format(name=self.vector)] = None
        if self.quiet:
            words = ", ".join(f"T.{w}" for w in sorted(self.quiet))
            self.notes[_FLAGS.format(words=words)] = None
        notes = tuple(self.notes)
        line = Line(self.kernel.path, self.kernel.line)
        return TileKernel(self.kernel.name, tuple(self.parameters), grid, numbers, body, options, notes, line)

    def joined(self, body: tuple[Statement, ...]) -> tuple[Statement, ...]:
        """Return the statements of both cores as one sequence on whole tiles."""
        scopes = {s.core for s in walked(body) if isinstance(s, CoreScope)}
        shared = only_core(self.shared or ())
        if outside := [s for s in only_core(body) if shared and s not in shared]:
            raise refused(
                outside[0].line, "statements before or after T.Persistent, which each core runs once, are not supported"
            )
        has_products = any(isinstance(s, MatrixProduct) for s in walked(body))
        if scopes == {"C", "V"}:
            body = one_sequence(body)
            self.notes[_ORDER] = None
        else:
            body = only_core(body)
        check_places(body, self.common_bytes())
        if has_products:
            body = with_gathered_rows(body, self.vector)
            ordered = ordered_by_workspaces(body, self.kernel.workspace_names) if not scopes else body
            if ordered != body:
                self.notes[_BY_WORKSPACES] = None
            body = joined_halves(ordered, self.vector)
            plain = without_pipelines(body)
            if plain != body:
                self.notes[_PIPELINE] = None
            body = plain
        body = fused(with_invariant_slots(with_zeros_before(body)))
        whole = with_whole_parts(body) if has_products else body
        if whole != body:
            self.notes[_WHOLE] = None
        body = without_workspaces(whole, self.kernel.workspace_names)
        body = self.of_tasks(rolled(without_slots(flattened(without_slots(body)))))
        return without_overwritten(body)

    def of_tasks(self, body: tuple[Statement, ...]) -> tuple[Statement, ...]:
        """Return a loop over the tasks of a core as the statements of one task; each task is a program."""
        if len(self.numbers) != 1:
            return body
        name = f"{self.numbers[0]}_task"
        result = tasks_of(body, self.numbers[0], self.grid[0], name)
        if result is None:
            return body
        self.grid, self.numbers = (result.count,), [result.variable]
        self.notes[_TASKS] = None
        return result.body

    def common_bytes(self) -> dict[TileBuffer, set[TileBuffer]]:
        """Return the tiles of one memory that have common bytes, because the program states where they begin."""
        spans = {b: (at, at + size_of(b.part) * width_of(b.tile.fmt)) for b, at in self.addresses.items()}
        return {
            b.tile: {
                o.tile for o, (c, d) in spans.items() if o is not b and o.space == b.space and start < d and c < end
            }
            for b, (start, end) in spans.items()
        }

    def parameter(self, name: str, kind: object) -> object:
        """Return the value of a parameter."""
        self._taken[name] += 1
        if isinstance(kind, TensorType):
            shape = self.sizes(kind.shape)
            strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
            tile = TileBuffer(name, shape, self.format(kind.fmt), strides, is_global=True)
            self.parameters.append(tile)
            return TracedBuffer(tile, "GM", self.refuse)
        if name in self.scalars:
            return self.scalars[name]
        fmt = self.format(str(kind)) if isinstance(kind, str) else "int32"
        self.parameters.append((name, fmt))
        return TracedValue(Variable(name), self.refuse)

    def with_numbers(self, names: dict[str, object]) -> dict[str, object]:
        """Return names with the numbers of a launch in place of sizes of ``T.symbolic``."""
        of = self.kernel.sizes
        return {n: of.get(x.name, x) if isinstance(x, SymbolicSize) else x for n, x in names.items()}

    def refuse(self, why: str) -> ProgramError:
        """Return the error for a statement that cannot be read."""
        return refused(self.line, why)

    def format(self, name: str) -> str:
        """Return a format by its name in a program."""
        fmt = ALIASES.get(name, name)
        if fmt not in TYPES:
            raise self.refuse(f"npusim has no rule for the format {name}; allowed: {', '.join(sorted(TYPES))}")
        return fmt

    def sizes(self, shape: object) -> tuple[int, ...]:
        """Return the sizes of a buffer."""
        sizes = tuple(shape) if isinstance(shape, tuple | list) else (shape,)
        sizes = tuple(self.kernel.sizes.get(n.name, n) if isinstance(n, SymbolicSize) else n for n in sizes)
        if any(isinstance(n, bool) or not isinstance(n, int) for n in sizes):
            raise self.refuse(f"the shape {sizes!r:.60} has sizes that are not constants; give them with -a")
        return sizes

    def fresh(self, name: str) -> str:
        """Return a name that no buffer, loop or value has."""
        self._taken[name] += 1
        if self._taken[name] == 1:
            return name
        while self._taken[result := f"{name}_{self._taken[name]}"]:
            self._taken[name] += 1
        self._taken[result] += 1
        return result

    def allocated(self, word: str, shape: object, fmt: str) -> TracedBuffer:
        """Return a buffer, under the name of the variable that the statement assigns."""
        tile = TileBuffer(self.fresh(self.target or word), self.sizes(shape), self.format(fmt))
        return TracedBuffer(tile, word.removeprefix("alloc_"), self.refuse)

    def add(self, *statements: Statement) -> None:
        """Add statements after the statements that were read so far."""
        self._statements += statements

    @contextmanager
    def inside(self, own: Mapping[str, object] = {}) -> Iterator[list[Statement]]:
        """Read the statements of a branch, or of a loop, which has its ``own`` numbers; names that are bound inside are
        not known after the loop or branch.
        """
        before, outer, line = self.names, self._statements, self.line
        self.names = {**before, **own}
        self._statements = result = list[Statement]()
        yield result
        for name in [n for n, x in before.items() if n not in own and self.names[n] is not x]:
            self.notes[_SHADOWED.format(line=line, name=name)] = None
        self.names, self._statements = before, outer

    # ------------------------------------------------------------ words that frame statements
    def word(self, name: str) -> object:
        """Return a word of the language."""
        if name in _LOOPS:
            return lambda *bounds, num_stages=0, **more: self.loop_of(name, bounds, num_stages, more)
        if name == "Kernel":
            return self.launch
        if name == "Scope":
            return TracedScope
        return self._words.word(name)

    def loop_of(self, word: str, bounds: tuple[object, ...], stages: object, more: Mapping[str, object]) -> TracedLoop:
        """Return the range of a loop."""
        if len(bounds) > 2 and word not in ("Parallel", "Persistent"):
            raise self.refuse(f"T.{word} has a step, which is not supported")
        for name in more:
            self.notes[f"{self.line}: T.{word}({name}=) changes only the time; npusim ignores it"] = None
        return TracedLoop(word, bounds, stages if isinstance(stages, int) else 0)

    def launch(self, *grid: object, threads: object = None, **_: object) -> TracedLaunch:
        """Return a grid."""
        return TracedLaunch(self.sizes(grid), threads is None)

    # ------------------------------------------------------------ statements
    def body(self, nodes: Iterable[ast.stmt]) -> None:
        """Read statements."""
        for node in nodes:
            self.line, self.target = Line(self.kernel.path, node.lineno), ""
            self.statement(node)

    def statement(self, node: ast.stmt) -> None:
        """Read a statement."""
        if isinstance(node, ast.Expr):
            self.value(node.value)
        elif isinstance(node, ast.Assign) and len(node.targets) == 1:
            self.assign(node.targets[0], node.value)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            self.assign(node.target, node.value)
        elif isinstance(node, ast.AugAssign):
            whole = ast.BinOp(_loaded(node.target), node.op, node.value)
            self.assign(node.target, ast.copy_location(whole, node))
        elif isinstance(node, ast.For) and not node.orelse:
            self.loop(node)
        elif isinstance(node, ast.If):
            self.branch(node)
        elif isinstance(node, ast.With) and len(node.items) == 1:
            self.framed(node)
        elif isinstance(node, ast.FunctionDef):
            self.define(node)
        elif isinstance(node, ast.Assert):
            self.value(node.test)
        elif not isinstance(node, ast.Pass):
            raise self.refuse(f"npusim has no rule for a statement of the kind {type(node).__name__}")

    def value(self, node: ast.expr) -> object:
        """Return the value of an expression."""
        macro = self.macro(node)
        if macro is not None:
            return macro
        tree = ast.fix_missing_locations(ast.Expression(_Logic().visit(node)))
        code = compile(tree, self.kernel.path, "eval")
        try:
            return eval(code, self.names)  # the program's own text
        except NpusimError:
            raise
        except Exception as error:
            raise self.refuse(f"{type(error).__name__}: {error}") from error

    def macro(self, node: ast.expr) -> object | None:
        """Read the statements of a ``T.macro`` at its call; None for another expression."""
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name | ast.Attribute):
            return None
        called = self.names.get(node.func.id) if isinstance(node.func, ast.Name) else self.value(node.func)
        if not isinstance(called, FunctionType) or not getattr(called, "is_macro", False):
            return None
        import inspect

        given = [self.value(a) for a in node.args]
        named = {k.arg: self.value(k.value) for k in node.keywords if k.arg is not None}
        try:
            bound = inspect.signature(called).bind(*given, **named)
        except TypeError as error:
            raise self.refuse(f"{called.__name__}: {error}") from None
        bound.apply_defaults()
        outer, line = self.names, self.line
        self.names = {**self.with_numbers(_names_of(called)), **bound.arguments}
        *statements, last = _definition(called).body
        self.body(statements)
        self.line = Line(self.kernel.path, last.lineno)
        returned: object = ()
        if isinstance(last, ast.Return):
            returned = self.value(last.value) if last.value is not None else ()
        else:
            self.statement(last)
        self.names, self.line = outer, line
        return returned

    def define(self, node: ast.FunctionDef) -> None:
        """Define a helper function in the kernel's text."""
        module = ast.fix_missing_locations(ast.Module([node], []))
        exec(compile(module, self.kernel.path, "exec"), self.names)  # the program's own text

    def assign(self, target: ast.expr, node: ast.expr) -> None:
        """Read an assignment: of a name, of several, or of an element of a buffer."""
        if isinstance(target, ast.Name):
            self.target = target.id
            value = self.value(node)
            self.names[target.id] = self.bound(target.id, value)
        elif isinstance(target, ast.Subscript):
            value, owner = self.value(node), self.value(target.value)
            if not isinstance(owner, TracedBuffer):
                raise self.refuse("an assignment sets an element of a value that is not a buffer")
            element = owner[self.value(target.slice)]
            if not isinstance(element, TracedElement):
                raise self.refuse(
                    f"an assignment to a part of {owner.tile.name} is not supported; use T.copy or T.tile"
                )
            result = Elementwise((), owner.tile, element.indices, self._words.number(value), None, self.line)
            self.add(ParallelNest((), (result,), self.line))
        elif isinstance(target, ast.Tuple):
            values = self.value(node)
            if not isinstance(values, tuple | list) or len(values) != len(target.elts):
                raise self.refuse(f"an assignment has {len(target.elts)} names for {values!r:.60}")
            for t, x in zip(target.elts, values, strict=True):
                if not isinstance(t, ast.Name):
                    raise self.refuse("an assignment of several elements is not supported")
                self.names[t.id] = self.bound(t.id, x)
        else:
            raise self.refuse(f"an assignment to {ast.unparse(target)} is not supported")

    def bound(self, name: str, value: object) -> object:
        """Return a value for a name; elements of buffers are read where the name is assigned."""
        if isinstance(value, TracedValue | TracedCondition) and any(
            isinstance(e, BufferElement) for e in parts_of(value.expression)
        ):
            result = Variable(self.fresh(name))
            self.add(BoundValue(result.name, value.expression, self.line))
            of = TracedValue if isinstance(value, TracedValue) else TracedCondition
            return of(result, self.refuse)
        return value

    def branch(self, node: ast.If) -> None:
        """Read an if; both branches are read if the condition is known only at run time."""
        condition, line = self.value(node.test), self.line
        if isinstance(condition, TracedValue):
            condition = condition != 0
        if not isinstance(condition, TracedCondition):
            self.body(node.body if condition else node.orelse)
            return
        with self.inside() as then:
            self.body(node.body)
        with self.inside() as otherwise:
            self.body(node.orelse)
        result = Conditional(condition.expression, tuple(then), tuple(otherwise), line)
        self.add(product_that_clears(result) or result)

    def framed(self, node: ast.With) -> None:
        """Read the statements of a grid or of a core."""
        frame, names = self.value(node.items[0].context_expr), node.items[0].optional_vars
        if isinstance(frame, TracedScope):
            if frame.core not in ("C", "V"):
                raise self.refuse(f"T.Scope({frame.core!r}); allowed: 'C', 'V'")
            outer, line = self._statements, self.line
            self._statements = list[Statement]()
            self.body(node.body)
            outer.append(CoreScope(frame.core, tuple(self._statements), line))
            self._statements = outer
            return
        if not isinstance(frame, TracedLaunch):
            raise self.refuse(f"with {ast.unparse(node.items[0].context_expr)}")
        self.numbered(frame, names)
        self.body(node.body)

    def numbered(self, launch: TracedLaunch, names: ast.expr | None) -> None:
        """Assign names to the programs' numbers."""
        if self.numbers:
            raise self.refuse("a function has a second T.Kernel, which is not supported")
        listed = names.elts if isinstance(names, ast.Tuple | ast.List) else [names] if names is not None else []
        is_named = not listed or 0 <= len(listed) - len(launch.grid) <= 1
        if any(not isinstance(n, ast.Name) for n in listed) or not is_named:
            raise self.refuse(
                f"T.Kernel has {len(launch.grid)} numbers and that of the vector core, but {len(listed)} names"
            )
        if len(listed) > len(launch.grid) and not launch.has_vector_core:
            raise self.refuse("a kernel with threads= does not have the number of a vector core")
        self.grid = launch.grid
        for i in range(len(launch.grid)):
            self.numbers.append(self.fresh(listed[i].id if i < len(listed) else "block"))  # type: ignore[attr-defined]
        for name, own in zip(listed, self.numbers, strict=False):
            self.names[name.id] = TracedValue(Variable(own), self.refuse)  # type: ignore[attr-defined]
        if len(listed) > len(launch.grid):
            self.vector = self.fresh(listed[-1].id)  # type: ignore[attr-defined]
            self.names[listed[-1].id] = TracedValue(Variable(self.vector), self.refuse)  # type: ignore[attr-defined]

    def loop(self, node: ast.For) -> None:
        """Read a loop."""
        over, line = self.value(node.iter), self.line
        if not isinstance(over, TracedLoop):
            self.unrolled(node, over)
            return
        targets = node.target.elts if isinstance(node.target, ast.Tuple | ast.List) else [node.target]
        if over.word == "Persistent":
            self.persistent(node, over, targets)
            return
        count = len(over.bounds) if over.word == "Parallel" else 1
        if len(targets) != count or any(not isinstance(t, ast.Name) for t in targets):
            raise self.refuse(f"{ast.unparse(node.target)} does not match the {count} bounds of T.{over.word}")
        variables = [self.fresh(t.id) for t in targets]  # type: ignore[attr-defined]
        numbers = [TracedValue(Variable(name), self.refuse) for name in variables]
        with self.inside({t.id: x for t, x in zip(targets, numbers, strict=True)}) as result:  # type: ignore[attr-defined]
            self.body(node.body)
        self.line = line
        if over.word == "Parallel":
            self.add(self.nest(variables, over, result))
            return
        if over.stages:
            self.stages.add(over.stages)
        low, high = ((0, *over.bounds) if len(over.bounds) == 1 else over.bounds)[:2]
        serial = SerialLoop(variables[0], self._words.number(low), self._words.number(high), tuple(result), line)
        if (rows := rows_at_once(serial)) is not None:
            self.notes[f"{line}: a loop over the rows of a tile is timed as one instruction on all rows"] = None
        if rows is None and (summed := running_sum(serial, self._statements)) is not None:
            self.notes[
                (f"{line}: a running sum is timed as one instruction, and the order of its additions is assumed")
            ] = None
            rows = (summed,)
        self.add(*(rows or (serial,)))

    def persistent(self, node: ast.For, over: TracedLoop, targets: list[ast.expr]) -> None:
        """Read the blocks that the cores share; each block is a program."""
        sizes, cores, core = over.bounds if len(over.bounds) == 3 else (None, None, None)
        is_own = isinstance(core, TracedValue) and core.expression == Variable(self.numbers[0] if self.numbers else "")
        if (cores,) != self.grid or not is_own or self.shared is not None:
            raise self.refuse(
                "T.Persistent needs the blocks, T.Kernel's number of programs, and the index of this program"
            )
        counts = self.sizes(sizes)
        if len(targets) != len(counts) or any(not isinstance(t, ast.Name) for t in targets):
            raise self.refuse(f"{ast.unparse(node.target)} does not match the {len(counts)} sizes of T.Persistent")
        core_name, self.grid, self.numbers = self.numbers[0], (math.prod(counts),), [self.fresh("block")]
        rest, own = TracedValue(Variable(self.numbers[0]), self.refuse), dict[str, object]()
        for i, t in enumerate(targets):
            behind = math.prod(counts[i + 1 :])
            own[t.id] = (rest // behind if behind > 1 else rest) % counts[i]  # type: ignore[attr-defined]
        with self.inside(own) as result:
            self.body(node.body)
        if core_name in variables_of(expressions_in(result)):
            raise self.refuse(f"the blocks that all cores share use {core_name}, the number of one core")
        self.shared = tuple(result)
        self.add(*result)

    def unrolled(self, node: ast.For, values: object) -> None:
        """Read the body of a loop over values of the text once for each value."""
        if not isinstance(values, Iterable) or not isinstance(node.target, ast.Name):
            raise self.refuse(f"a loop over {ast.unparse(node.iter)} is not supported")
        for x in values:
            self.names[node.target.id] = x
            self.body(node.body)

    def nest(self, variables: list[str], over: TracedLoop, made: list[Statement]) -> ParallelNest:
        """Return parallel loops with their statements; the conditions around a statement become conditions of the
        statement.
        """
        axes = tuple(zip(variables, self.sizes(over.bounds), strict=True))
        result = list[Elementwise | BoundValue]()

        def follow(statements: Iterable[Statement], rule: Expression | None) -> None:
            for s in statements:
                if isinstance(s, BoundValue):
                    result.append(s)
                elif isinstance(s, ParallelNest) and not s.axes:
                    result.extend(replace(x, axes=axes, condition=rule) for x in s.body if isinstance(x, Elementwise))
                elif isinstance(s, Conditional) and (x := chosen_element(s)) is not None:
                    result.append(replace(x, axes=axes, condition=rule))
                elif isinstance(s, Conditional):
                    name = self.fresh("condition")
                    result.append(BoundValue(name, s.condition, s.line))
                    then: Expression = Variable(name)
                    for body, own in ((s.then, then), (s.otherwise, Applied("not", (then,)))):
                        follow(body, own if rule is None else Applied("and", (rule, own)))
                else:
                    raise refused(
                        s.line,
                        "a T.Parallel nest contains a loop, copy or tile instruction; write it outside of the nest",
                    )

        follow(made, None)
        return ParallelNest(axes, tuple(result), self.line)


def product_that_clears(s: Conditional) -> MatrixProduct | None:
    """Return, as one product, an if between two products that differ only in whether they clear their result; None for
    any other if.
    """
    if len(s.then) != 1 or len(s.otherwise) != 1:
        return None
    one, other = s.then[0], s.otherwise[0]
    if not isinstance(one, MatrixProduct) or not isinstance(other, MatrixProduct):
        return None
    clears = one.clears, other.clears
    alike = (one.a, one.b, one.c, one.transposes) == (other.a, other.b, other.c, other.transposes)
    if not alike or clears != (Literal(1, "bool"), Literal(0, "bool")):
        return None
    return replace(one, clears=s.condition)


def chosen_element(s: Conditional) -> Elementwise | None:
    """Return an if that assigns one element in both branches as one assignment that chooses a value; None for any other
    if.
    """
    ways = [b[0].body for b in (s.then, s.otherwise) if len(b) == 1 and isinstance(b[0], ParallelNest)]
    one, other = (w[0] if len(w) == 1 else None for w in ways) if len(ways) == 2 else (None, None)
    if not isinstance(one, Elementwise) or not isinstance(other, Elementwise):
        return None
    if one.buffer is not other.buffer or one.indices != other.indices:
        return None
    return replace(one, value=chosen_value(s.condition, one.value, other.value))


def tensors_read(body: Iterable[Statement]) -> set[TileBuffer]:
    """Return the tensors that statements read."""
    every = (e for x in expressions_in(body) for e in parts_of(x) if isinstance(e, BufferElement))
    return {e.buffer for e in every if e.buffer.is_global}


def only_core(body: Iterable[Statement]) -> tuple[Statement, ...]:
    """Return statements without their core scopes, and without flags between cores, if only one core has statements."""
    result = list[Statement]()
    for s in body:
        if isinstance(s, CoreScope):
            result += only_core(s.body)
        elif isinstance(s, SerialLoop):
            result.append(replace(s, body=only_core(s.body)))
        elif isinstance(s, Conditional):
            result.append(replace(s, then=only_core(s.then), otherwise=only_core(s.otherwise)))
        elif not isinstance(s, CrossFlag):
            result.append(s)
    return tuple(result)


def rows_at_once(loop: SerialLoop) -> tuple[Statement, ...] | None:
    """Return a loop whose iterations are rows of tiles as parallel loops, one for each statement.

    Each statement writes a row that no other iteration reads or writes.  The result is None for other loops.
    """
    count = linear(Applied("-", (loop.high, loop.low)), {})
    if set(count) != {Literal(1)} or loop.low != Literal(0) or count[Literal(1)] < 1:
        return None
    row, rows = Variable(loop.variable), dict[TileBuffer, int]()
    targets = list[Elementwise]()
    for s in loop.body:
        if not isinstance(s, ParallelNest) or len(s.body) != 1 or not isinstance(s.body[0], Elementwise):
            return None
        (x,) = s.body
        assert isinstance(x, Elementwise)
        at = [d for d, index in enumerate(x.indices) if loop.variable in variables_of([index])]
        if x.condition is not None or x.buffer.is_global or len(at) != 1 or x.indices[at[0]] != row:
            return None
        if rows.setdefault(x.buffer, at[0]) != at[0]:
            return None
        targets.append(x)
    for x in targets:
        for e in parts_of(x.value):
            if isinstance(e, BufferElement) and e.buffer in rows and e.indices[rows[e.buffer]] != row:
                return None
    if not targets:
        return None
    own = (loop.variable, int(count[Literal(1)]))
    result = [replace(x, axes=(own, *x.axes)) for x in targets]
    return tuple(ParallelNest(x.axes, (x,), x.line) for x in result)


def running_sum(loop: SerialLoop, before: Sequence[Statement]) -> TileReduction | None:
    """Return ``if i > 0: s[i] = s[i - 1]`` and ``s[i] = s[i] + x[i]`` as sums up to each element, if s is 0 before the
    loop.

    ``before``: the statements before the loop.  None: another loop.
    """
    i, names = Variable(loop.variable), {s.name: s.value for s in loop.body if isinstance(s, BoundValue)}
    rest = [s for s in loop.body if not isinstance(s, BoundValue)]
    shift, added = (rest[0], only_element(rest[1])) if len(rest) == 2 else (None, None)
    if not isinstance(shift, Conditional) or shift.otherwise or len(shift.then) != 1 or added is None:
        return None
    moved, whole = only_element(shift.then[0]), substituted(added.value, names)
    axis = next((d for d, index in enumerate(added.indices) if index == i), None)
    if moved is None or axis is None or shift.condition != Applied("gt", (i, _ZERO)) or loop.low != _ZERO:
        return None
    target = BufferElement(added.buffer, added.indices)
    earlier = tuple(simpler(Applied("-", (x, Literal(1)))) if d == axis else x for d, x in enumerate(added.indices))
    is_shift = (moved.buffer, moved.indices) == (target.buffer, target.indices)
    if not is_shift or moved.value != BufferElement(target.buffer, earlier) or not isinstance(whole, Applied):
        return None
    source = whole.operands[1] if whole.word == "+" and whole.operands[0] == target else None
    if not isinstance(source, BufferElement) or source.buffer.is_global or source.buffer is target.buffer:
        return None
    tiles = source.buffer, target.buffer
    is_of_tiles = not target.buffer.is_global and tiles[0].shape == tiles[1].shape and source.indices == target.indices
    if not is_of_tiles or loop.high != Literal(tiles[0].shape[axis]) or not is_zero(target.buffer, before):
        return None
    parts = [BufferPart(b, (_ZERO,) * len(b.shape), b.shape) for b in tiles]
    return TileReduction(parts[0], parts[1], "sum", axis, True, loop.line, cumulates=True)


def only_element(s: Statement) -> Elementwise | None:
    """Return the only assignment in a statement, if it is to one element; None for other statements."""
    x = only_assignment(s)
    return x if x is not None and not x.axes else None


def is_zero(tile: TileBuffer, before: Sequence[Statement]) -> bool:
    """Return whether the last of some statements that write a tile fills it with 0."""
    own = [s for s in before if tile in written_buffers([s])]
    x = only_assignment(own[-1]) if own else None
    is_fill = x is not None and isinstance(x.value, Literal) and x.value.value == 0
    return x is not None and is_fill and math.prod(n for _, n in x.axes) == math.prod(tile.shape)


class _Logic(ast.NodeTransformer):
    """Provides ``and``, ``or`` and ``not`` as functions, which join conditions that are only known at run time."""

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:  # the name that `ast` calls
        self.generic_visit(node)
        name = _ALL if isinstance(node.op, ast.And) else _ANY
        empty = ast.arguments([], [], None, [], [], None, [])
        return ast.copy_location(_called(name, *(ast.Lambda(empty, x) for x in node.values)), node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        self.generic_visit(node)
        return ast.copy_location(_called(_NOT, node.operand), node) if isinstance(node.op, ast.Not) else node


def _called(name: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), list(arguments), [])


def _joined(word: str, *operands: object) -> object:
    """Return the conjunction or disjunction of operands as Python evaluates it; conditions that are only known at run
    time become one condition.
    """
    result: object = word == "and"
    for operand in operands:
        x = operand()  # type: ignore[operator]
        x = x != 0 if isinstance(x, TracedValue) else x
        if isinstance(result, TracedCondition):
            result = result.joined(word, bool(x) if not isinstance(x, TracedCondition) else x)
        elif isinstance(x, TracedCondition):
            result = x if bool(result) is (word == "and") else result
        elif bool(x) is not (word == "and"):
            return x
        else:
            result = x
    return result


def _negated(x: object) -> object:
    x = x != 0 if isinstance(x, TracedValue) else x
    return x.negation() if isinstance(x, TracedCondition) else not x


def _definition(function: FunctionType) -> ast.FunctionDef:
    """Return a function's text, with the lines of its file."""
    path, first = function.__code__.co_filename, function.__code__.co_firstlineno
    for node in ast.walk(ast.parse(Path(path).read_text())):
        if isinstance(node, ast.FunctionDef) and node.name == function.__name__:
            lines = [node.lineno, *(d.lineno for d in node.decorator_list)]
            if min(lines) == first:
                return node
    raise SpecError(f"{path}:{first}: the source of {function.__name__} is not available")


def _names_of(function: FunctionType) -> dict[str, object]:
    """Return the names that a function's text can use: those of its module, of its closure, and the words of loops."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    own = {"__builtins__": builtins, "range": _range}
    own |= {_ALL: lambda *x: _joined("and", *x), _ANY: lambda *x: _joined("or", *x), _NOT: _negated}
    return {**function.__globals__, **{name: cell.cell_contents for name, cell in cells if _has_value(cell)}, **own}


def _has_value(cell: object) -> bool:
    try:
        cell.cell_contents  # type: ignore[attr-defined]  # noqa: B018
    except ValueError:
        return False
    return True


def _range(*bounds: object) -> TracedLoop | range:
    if len(bounds) > 2:
        return range(*map(operator.index, bounds))  # type: ignore[arg-type]
    return TracedLoop("range", bounds)


def _loaded(node: ast.expr) -> ast.expr:
    """Return the target of an assignment as an expression that is read."""
    copied = ast.parse(ast.unparse(node), mode="eval").body
    return ast.copy_location(copied, node)
