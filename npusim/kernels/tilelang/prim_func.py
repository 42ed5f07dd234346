"""Reads the PrimFunc that TileLang's parser creates from a kernel, before any pass, as statements on tiles.

In this form copies, fills, products and reductions are single calls, and loops have the annotations of the program.
Layouts, vectors, threads and barriers, which later passes add, do not affect values.  A line of the program without a
counterpart is refused; a note names lines that change only times.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from npusim.errors import ProgramError
from npusim.kernels.tilelang.float_flags import with_float_flags
from npusim.kernels.tilelang.statements import (
    TYPES,
    Applied,
    BarrierStep,
    BoundValue,
    BufferElement,
    BufferPart,
    Conditional,
    CoreScope,
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
    interval,
    linear,
    refused,
    simpler,
    variables_of,
    walked,
    with_inner,
)
from npusim.kernels.tilelang.tile_parts import with_parts_apart
from npusim.kernels.tilelang.tile_slots import without_slots
from npusim.kernels.tilelang.ttir_writer import BY_ITSELF, chosen_value, part_as_nest
from npusim.kernels.tilelang.warp_groups import in_text_order
from npusim.kernels.triton.compiler import OPTIONS
from npusim.kernels.triton.ttir_text import Line, refusing

if TYPE_CHECKING:
    from tvm import tirx

_WARP = 32
_PARALLEL = 1  # tirx.ForKind
#: Largest number of iterations of a loop inside parallel loops that is expanded.
_MOST_REPEATED = 16
#: Words of two operands by the class of their node.
_OF_TWO = MappingProxyType(
    {"Add": "+", "Sub": "-", "Mul": "*", "Div": "/", "FloorDiv": "//", "FloorMod": "%", "Mod": "rem"}
    | {"Min": "min", "Max": "max", "And": "and", "Or": "or"}
    | {name.upper(): name for name in ("eq", "ne", "lt", "le", "gt", "ge")}
)
#: Calls of two operands.
_CALLS_OF_TWO = MappingProxyType(
    {"bitwise_and": "and", "bitwise_or": "or", "bitwise_xor": "xor", "shift_left": "<<", "shift_right": ">>"}
    | {"fmax": "max", "fmin": "min", "max": "max", "min": "min", "ieee_add": "+", "ieee_sub": "-", "ieee_mul": "*"}
    | {"ieee_fdiv": "/"}
)
#: Calls of one operand that have another name in `ttir_writer.FUNCTIONS`.
_RENAMED = MappingProxyType({"__exp": "exp", "__log": "log", "__log2": "log2", "ieee_fsqrt": "sqrt"})
_APPROXIMATE = frozenset({"__exp", "__log", "__log2"})
#: Calls without an effect on values.
_QUIET = frozenset(
    {"no_set_max_nreg", "set_max_nreg", "assume", "tvm_storage_sync", "sync_threads", "inject_fence_proxy"}
    | {"wait_wgmma", "warpgroup_arrive", "print", "device_assert", "annotate_producer_reg_dealloc"}
    | {"annotate_consumer_reg_alloc", "fence_proxy_async"}
)
#: Calls that record times of the GPU, and have no effect on values.
_EVENTS = frozenset({"TL_IKET_EVENT", "TL_IKET_EVENT_PAYLOAD_U32", "TL_IKET_EVENT_PAYLOAD_F32"})
_EVENTS_NOTE = "events of tilelang.tools.cuda.iket take time on a GPU; npusim ignores them"
#: Annotations and attributes that change only the time, which npusim ignores.
TIME_ALONE: Mapping[str, str] = MappingProxyType(
    {"threadblock_swizzle_pattern": "the order of blocks (T.use_swizzle)", "layout_map": "T.annotate_layout"}
    | {"l2_hit_ratio_map": "T.annotate_l2_hit_ratio", "tl.min_blocks_per_sm": "T.annotate_min_blocks_per_sm"}
    | {"tl_pipeline_order": "T.Pipelined(order=)", "tl_pipeline_stage": "T.Pipelined(stage=)"}
    | {"tl_pipeline_group": "T.Pipelined(group=)", "software_pipeline_order": "T.Pipelined(order=)"}
    | {"software_pipeline_stage": "T.Pipelined(stage=)", "coalesced_width": "coalesced_width"}
    | {"parallel_loop_layout": "loop_layout", "prefer_async": "prefer_async", "disable_tma": "disable_tma"}
    | {"eviction_policy": "eviction_policy", "prefer_instruction": "prefer_instruction", "k_pack": "k_pack"}
    | {"wg_wait": "wg_wait", "batch": "batch of a reduction", "tl.ws_pipeline_depth": "T.annotate_ws_pipeline_depth"}
    | {"pragma_unroll_explicit": "T.unroll", "pragma_unroll_factor": "T.unroll", "use_async_copy": "an async copy"}
)
#: Keys of pass configurations that change only the time; of other configurations, fast math gets a note, and all others
#: are refused.
CONFIGURATIONS = frozenset(
    {"tl.disable_warp_specialized", "tl.enable_auto_schedule", "tl.enable_auto_warp_specialization"}
    | {"tl.ptxas_register_usage_level", "tl.emit_line_directives", "tl.config_index_bitwidth"}
    | {"tl.layout_cost_model", "tl.disable_tma_lower", "tl.disable_vectorize_256", "tl.enable_async_copy"}
    | {"tl.enable_aggressive_shared_memory_merge", "tl.enable_ptxas_verbose_output", "tl.ast_print_enable"}
    | {"tl.disable_data_race_check", "tl.disable_buffer_init_check", "tl.disable_prelower_semantic_check"}
    | {"tl.Simplify", "tl.enable_reducer_plan_verbose", "tl.disable_dynamic_tail_split"}
    | {"tl.dynamic_alignment", "tl.debug_merge_shared_memory_allocations", "tl.disable_rng_guard"}
    | {"tl.layout_visualization_enable", "tl.layout_visualization_formats"}
    | {"tl.disable_wgmma", "tl.disable_shuffle_elect", "tir.disable_cse_tir", "tir.enable_equiv_terms_in_cse_tir"}
)
_POLICY, _ALONE = "the policy of T.gemm", " changes only the time; npusim ignores it"
_ORDERED = " changes the time, and the order of sums on a GPU; npusim ignores it"
_MAY_DIFFER = " may change the bits of 8-bit products on a GPU; npusim ignores it"
#: Ends of the notes on layouts, and on the instruction of products.
_LAYOUTS = tuple(f"{name}{_ALONE}" for name in (TIME_ALONE["layout_map"], TIME_ALONE["parallel_loop_layout"], _POLICY))
_INSTRUCTION = f"{TIME_ALONE['prefer_instruction']}{_ALONE}"
_SUMS_NOTE = (
    "the order of additions in T.reduce_sum and T.cumsum is assumed: on a GPU it depends on layouts and threads"
)
#: Functions for which CUDA's compiler uses other instructions than Triton's.
_OF_LIBRARY = frozenset({"exp", "exp2", "log", "log2", "sigmoid", "tanh", "erf", "sqrt", "rsqrt", "ieee_frcp", "/"})
_LIBRARY_NOTE = (
    "exponentials, logarithms, roots and divisions are computed by Triton's instructions; TileLang's compiler "
    "calls nvcc's functions (expf, logf), whose last bits may differ"
)
_GROUPS_NOTE = (
    "warp groups (T.ws): their barriers order each access as the text does, which is checked; times are those of "
    "a program without warp groups, barriers or separate slots"
)
_PERSISTENT_NOTE = "T.Persistent: the time is that of a grid with a program for each iteration"
_FAST, _UNGUARDED = "tl.enable_fast_math", "tl.disable_safe_memory_legalize"
_FAST_NOTE = (
    "fast math: on a GPU its exponentials, roots and divisions are approximate instructions; here they are "
    "computed as without fast math"
)


def sizes_of(function: tirx.PrimFunc, given: Mapping[int, Sequence[int] | int | float]) -> dict[str, int]:
    """Return the sizes of dynamic shapes, and whole numbers, by name: from the shapes and numbers of a launch."""
    sizes = dict[str, int]()
    for i, x in given.items():
        parameter = function.params[i]
        buffer = function.buffer_map.get(parameter)
        if isinstance(x, int | float):
            sizes |= {str(parameter.name): x} if isinstance(x, int) else {}
            continue
        for node, n in zip(buffer.shape if buffer is not None else (), x, strict=False):
            if type(node).__name__ == "Var":
                sizes[str(node.name)] = int(n)
    return sizes


def name_of(function: tirx.PrimFunc) -> str:
    """Return the name of a kernel."""
    attributes = dict(function.attrs) if function.attrs else {}
    return _identifier(str(attributes.get("global_symbol", "main")))


def parameters_of(function: tirx.PrimFunc, sizes: Mapping[str, int]) -> tuple[TileBuffer | tuple[str, str], ...]:
    """Return the parameters of a PrimFunc: a tensor, or the name and format of a number."""
    return _PrimFuncReader(function, {}, sizes).parameters


def first_line(function: tirx.PrimFunc) -> Line:
    """Return the first line that a statement of a PrimFunc has."""
    return _first_line(function.body)


def kernels_of(
    function: tirx.PrimFunc, configurations: Mapping[str, object], sizes: Mapping[str, int]
) -> list[TileKernel]:
    """Return the kernels of a PrimFunc, one for each ``T.Kernel``.

    ``configurations``: configurations of passes; ``sizes``: dynamic shapes and numbers of the launch, by name.  Raises
    `ProgramError` with the line that has no counterpart.
    """
    return _PrimFuncReader(function, configurations, sizes).kernels()


class _PrimFuncReader:
    """Walks one PrimFunc."""

    def __init__(self, function: tirx.PrimFunc, configurations: Mapping[str, object], sizes: Mapping[str, int]) -> None:
        self.function, self.sizes, self.configurations = function, sizes, configurations
        self.line = self.first = _first_line(function.body)
        self.buffers, self.variables = dict["tirx.Buffer", TileBuffer](), dict[object, Expression]()
        self.names, self.notes = dict[str, int](), list[str]()
        self.barriers, self.registers = dict[str, tuple[int, ...]](), set[TileBuffer]()
        self.unfinished: Line | None = None
        self.scratch, self.accessed = list[TileBuffer](), set[TileBuffer]()
        self.deferred = dict[object, "tirx.PrimExpr"]()
        self.ranges, self.bindings = dict[str, tuple[float, float]](), dict[str, Expression]()
        self.begin()
        self.parameters = tuple(map(self.parameter, function.params))

    def begin(self) -> None:
        """Forget the grid and the options of the previous launch."""
        self.grid, self.numbers = [1, 1, 1], ["", "", ""]
        self.threads, self.stages = 128, set[int]()
        self.thread: Variable | None = None
        self.accessed.clear()

    def parameter(self, p: tirx.Var) -> TileBuffer | tuple[str, str]:
        """Return a parameter: a tensor, or the name and format of a number."""
        if p in self.function.buffer_map:
            return self.buffer(self.function.buffer_map[p], is_global=True)
        name = self.name(str(p.name))
        self.variables[p] = Variable(name)
        if str(p.name) in self.sizes:
            self.ranges[name] = (self.sizes[str(p.name)],) * 2
        return name, self.format(str(p.dtype))

    def kernels(self) -> list[TileKernel]:
        """Return the kernels, one for each ``T.Kernel``; raise `ProgramError` with the line that has no counterpart."""
        for name in sorted(n for n, x in self.configurations.items() if x):
            if name not in CONFIGURATIONS | {_FAST, _UNGUARDED}:
                raise self.refuse(f"pass_configs: npusim ignores {name}")
        if self.configurations.get(_FAST):
            self.note(_FAST_NOTE)
        with refusing(self.line, "a TileLang kernel"):
            launches = self.launches(self.function.body)
            return [self.kernel(node, i if len(launches) > 1 else 0) for i, node in enumerate(launches, 1)]

    def launches(self, s: tirx.Stmt) -> list[tirx.For]:
        """Return the launches of a function; its buffers in global memory are tensors of all."""
        kind = type(s).__name__
        self.line = _line_of(s) or self.line
        if kind == "SBlockRealize":
            return self.launches(s.block)
        if kind == "SBlock":
            self.annotated(dict(s.annotations or {}))
            self.scratch += [self.buffer(b, is_global=True) for b in s.alloc_buffers]
            return self.launches(s.body)
        if kind == "SeqStmt":
            return [x for inner in s.seq for x in self.launches(inner)]
        if kind == "For" and s.thread_binding is not None:
            return [s]
        raise self.refuse("a statement outside of T.Kernel is not supported")

    def kernel(self, node: tirx.For, number: int) -> TileKernel:
        """Return one launch; ``number``: its number if there are several launches, else 0."""
        self.begin()
        body = with_float_flags(with_parts_apart(self.in_order(self.statements(node))))
        used = [p for p in (*self.parameters, *self.scratch) if not isinstance(p, TileBuffer) or p in self.accessed]
        return TileKernel(
            name_of(self.function) + (f"_{number}" if number else ""),
            tuple(used),
            tuple(self.grid),
            tuple(n or self.name("program") for n in self.numbers),
            body,
            self.options(),
            tuple(self.said(body)),
            _line_of(node) or self.first,
            is_guarded=not self.configurations.get(_UNGUARDED),
        )

    def in_order(self, body: tuple[Statement, ...]) -> tuple[Statement, ...]:
        """Return statements without warp groups, whose barriers order them as the text does."""
        if not any(isinstance(s, CoreScope | BarrierStep) for s in walked(body)):
            return body
        if self.unfinished is not None:
            raise refused(
                self.unfinished,
                "a product or copy that continues after its statement is not supported in a kernel with warp groups",
            )
        self.note(_GROUPS_NOTE)
        return without_slots(in_text_order(body, self.barriers, self.threads, self.registers))

    def options(self) -> dict[str, int]:
        """Return the warps and the stages of the deepest pipelined loop."""
        warps = max(1, self.threads // _WARP)
        timed = max(n for n in OPTIONS["num_warps"] if n <= warps)
        if timed * _WARP != self.threads:
            self.note(f"threads={self.threads}: the times are those of {timed * _WARP} threads")
        stages = max(1, *self.stages, 1)
        if len(self.stages) > 1:
            self.note(f"num_stages of loops: {sorted(self.stages)}; the times are those of {stages} for all loops")
        return {"num_warps": timed, "num_stages": min(stages, max(OPTIONS["num_stages"]))}

    def said(self, body: tuple[Statement, ...]) -> list[str]:
        """Return the notes on a kernel; a layout decides the order of its sums, and an instruction decides the order of
        8-bit sums.
        """
        notes, formats = [*self.notes], {b.fmt for b in self.buffers.values()}
        if has_sums(body):
            notes = [n.replace(_ALONE, _ORDERED) if n.endswith(_LAYOUTS) else n for n in notes]
            notes.append(_SUMS_NOTE)
        if any(f.startswith("float8") for f in formats):
            notes = [n.replace(_ALONE, _MAY_DIFFER) if n.endswith(_INSTRUCTION) else n for n in notes]
            notes += [f"tl.disable_wgmma{_MAY_DIFFER}"] if self.configurations.get("tl.disable_wgmma") else []
        return notes

    def note(self, text: str) -> None:
        """Add a note once."""
        if text not in self.notes:
            self.notes.append(text)

    def refuse(self, why: str) -> ProgramError:
        return refused(self.line, why)

    def name(self, text: str) -> str:
        """Return a name that only this kernel has."""
        base = _identifier(text)
        self.names[base] = self.names.get(base, 0) + 1
        return base if self.names[base] == 1 else self.name(f"{base}{self.names[base]}")

    def format(self, dtype: str) -> str:
        if dtype not in TYPES:
            raise self.refuse(f"npusim has no rule for the format {dtype}; allowed: {', '.join(sorted(TYPES))}")
        return dtype

    def number(self, node: tirx.PrimExpr) -> int:
        """Return a size that the launch determines."""
        expression = self.expression(node)
        low, high = interval(expression, self.ranges)
        if low == high:
            return int(low)
        terms = linear(expression, self.bindings)
        if set(terms) - {Literal(1)}:
            raise self.refuse(f"the launch does not determine the size {node}")
        return int(terms.get(Literal(1), 0))

    def buffer(self, node: tirx.Buffer, *, is_global: bool = False) -> TileBuffer:
        if node in self.buffers:
            self.accessed.add(self.buffers[node])
            return self.buffers[node]
        like = next((b for n, b in self.buffers.items() if n.data.same_as(node.data)), None)
        if like is not None:
            raise self.refuse(
                f"the kernel accesses {node.name}, a view (T.reshape, T.view) of {like.name}: use {like.name} directly"
            )
        if not is_global and str(node.scope()) not in _SCOPES:
            raise self.refuse(f"the kernel has a buffer in {node.scope()}; allowed: {', '.join(sorted(_SCOPES))}")
        shape = tuple(self.number(n) for n in node.shape)
        strides = tuple(self.number(n) for n in node.strides)
        strides = strides or tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        result = TileBuffer(self.name(str(node.name)), shape, self.format(str(node.dtype)), strides, is_global)
        self.buffers[node] = result
        return result

    # ------------------------------------------------------------ statements
    def statements(self, s: tirx.Stmt) -> tuple[Statement, ...]:
        """Return the statements of a node."""
        before, self.line = self.line, _line_of(s) or self.line
        kind = type(s).__name__
        if kind == "SeqStmt":
            result = tuple(x for inner in s.seq for x in self.statements(inner))
        elif kind == "SBlockRealize":
            result = self.statements(s.block)
        elif kind == "SBlock":
            result = self.block(s)
        elif kind == "For":
            result = self.loop(s)
        elif kind == "Bind":
            result = self.bound(s)
        elif kind == "IfThenElse" and (threads := self.group_of(s)) is not None:
            line = self.line
            result = (CoreScope(threads, self.statements(s.then_case), line),)
        elif kind == "IfThenElse":
            line, condition = self.line, self.expression(s.condition)
            then = self.statements(s.then_case)
            otherwise = self.statements(s.else_case) if s.else_case is not None else ()
            result = (Conditional(condition, then, otherwise, line),)
        elif kind == "AttrStmt":
            self.annotated({str(s.attr_key): s.value} if str(s.attr_key) != _GROUP else {})
            result = self.statements(s.body)
        elif kind == "BufferStore":
            result = (ParallelNest((), (self.stored(s, (), None),), self.line),)
        elif kind == "Evaluate":
            result = self.called(s.value)
        else:
            raise self.refuse(f"npusim has no rule for the statement {kind}")
        self.line = before
        return result

    def group_of(self, s: tirx.IfThenElse) -> str | None:
        """Return the threads ``first:end`` of a warp group (``T.ws``); None for another if."""
        inner = s.then_case
        while type(inner).__name__ == "SeqStmt":
            inner = inner.seq[0]
        if type(inner).__name__ != "AttrStmt" or str(inner.attr_key) != _GROUP:
            return None
        of = self.expression(s.condition)
        both = of.operands if isinstance(of, Applied) and of.word == "and" else ()
        ends = {x.word: x.operands for x in both if isinstance(x, Applied)}
        pairs = [ends.get("ge"), ends.get("lt")]
        numbers = [p[1] for p in pairs if p is not None and p[0] == self.thread and isinstance(p[1], Literal)]
        if len(both) != 2 or len(numbers) != 2 or s.else_case is not None:
            raise self.refuse("a warp group whose threads are not a range of numbers is not supported")
        first, end = (int(n.value) for n in numbers)
        return f"{first}:{end}"

    def block(self, s: tirx.SBlock) -> tuple[Statement, ...]:
        known = dict(s.annotations or {})
        for barrier, counts in dict(known.pop("barrier_init", {})).items():
            self.barriers[str(barrier.name)] = tuple(int(n) for n in counts)
        if "tl.launch_threads" in known:
            self.threads = math.prod(int(n) for n in known.pop("tl.launch_threads"))
        self.annotated(known)
        for b in s.alloc_buffers:
            if str(b.scope()) == "shared.barrier" and str(b.data.name) in self.barriers:
                continue
            result = self.buffer(b)
            if str(b.scope()).startswith("local"):
                self.registers.add(result)
        return self.statements(s.body)

    def annotated(self, annotations: Mapping[str, object]) -> None:
        """Read annotations: record those that change only the time, and refuse others."""
        for key in map(str, annotations):
            if key not in TIME_ALONE:
                raise self.refuse(f"the kernel has the annotation {key}, which may change values and is not supported")
            self.note(f"{self.line}: {TIME_ALONE[key]}{_ALONE}")

    def bound(self, s: tirx.Bind) -> tuple[Statement, ...]:
        if type(s.value).__name__ == "Call" and "launch_thread_idx" in str(s.value.op):
            # the number is refused where it is read
            self.variables[s.var] = result = Variable(f"thread_{len(self.variables)}")
            self.thread = self.thread or result
            return ()
        if self.is_of_later_loop(s.value):
            self.deferred[s.var] = s.value
            self.note(_PERSISTENT_NOTE)
            return ()
        name, value = self.name(str(s.var.name)), self.expression(s.value)
        self.variables[s.var], self.bindings[name] = Variable(name), value
        return (BoundValue(name, value, self.line),)

    def is_of_later_loop(self, e: tirx.PrimExpr) -> bool:
        """Return whether a whole number is computed from a loop's variable that is not yet known (``T.Persistent``).

        TileLang's compiler inserts the value where it is used.
        """
        if type(e).__name__ == "Var":
            return e in self.deferred or (e not in self.variables and str(e.name) not in self.sizes)
        inner = [getattr(e, n) for n in ("a", "b", "value") if hasattr(e, n) and type(e).__name__ not in _NUMBERS]
        return type(e).__name__ in {*_OF_TWO, "Cast"} and any(map(self.is_of_later_loop, inner))

    def loop(self, s: tirx.For) -> tuple[Statement, ...]:
        tag = str(s.thread_binding.thread_tag) if s.thread_binding is not None else ""
        name = self.name(str(s.loop_var.name))
        self.variables[s.loop_var] = Variable(name)
        if tag.startswith("blockIdx"):
            at = "xyz".index(tag[-1])
            self.grid[at], self.numbers[at] = self.number(s.extent), name
            return self.statements(s.body)
        if tag:
            raise self.refuse(f"the kernel has a loop over {tag}: npusim models blocks, not threads")
        if int(s.kind) == _PARALLEL:
            return self.nest(s, name)
        known, line = dict(s.annotations or {}), self.line
        if "num_stages" in known:
            self.stages.add(int(known.pop("num_stages")))
        self.annotated(known)
        low, extent = self.expression(s.min), self.expression(s.extent)
        high = extent if low == Literal(0) else Applied("+", (low, extent))
        return (SerialLoop(name, low, high, self.statements(s.body), line),)

    def nest(self, s: tirx.For, name: str) -> tuple[Statement, ...]:
        """Return parallel loops as one statement."""
        line, axes, inner = self.line, [(name, self.number(s.extent))], s.body
        self.annotated(dict(s.annotations or {}))
        while type(inner).__name__ == "For" and int(inner.kind) == _PARALLEL:
            axes.append((self.name(str(inner.loop_var.name)), self.number(inner.extent)))
            self.variables[inner.loop_var] = Variable(axes[-1][0])
            self.annotated(dict(inner.annotations or {}))
            inner = inner.body
        body = tuple(self.in_nest(inner, tuple(axes), None))
        own = {x.axes for x in body if isinstance(x, Elementwise)}
        if len(own) > 1 or (len(body) > 1 and own - {tuple(axes)}):
            raise self.refuse("an atomic addition of several neighbours needs a separate nest")
        return (ParallelNest(next(iter(own), tuple(axes)), body, line),)

    def in_nest(
        self, s: tirx.Stmt, axes: tuple[tuple[str, int], ...], condition: Expression | None
    ) -> list[Elementwise | BoundValue]:
        self.line, kind = _line_of(s) or self.line, type(s).__name__
        if kind == "SeqStmt":
            return [x for inner in s.seq for x in self.in_nest(inner, axes, condition)]
        if kind == "Bind":
            name = self.name(str(s.var.name))
            result = BoundValue(name, self.expression(s.value), self.line)
            self.variables[s.var] = Variable(name)
            return [result]
        if kind == "BufferStore":
            return [self.stored(s, axes, condition)]
        if kind == "IfThenElse":
            own, name = self.expression(s.condition), self.name("condition")
            then = Variable(name)
            ways: list[tuple[tirx.Stmt, Expression]] = [(s.then_case, then)]
            ways += [] if s.else_case is None else [(s.else_case, Applied("not", (then,)))]
            made_of: list[Elementwise | BoundValue] = [BoundValue(name, own, self.line)]
            if s.else_case is not None:
                pair = self.in_nest(s.then_case, axes, condition), self.in_nest(s.else_case, axes, condition)
                if (chosen := _chosen(then, *pair)) is not None:
                    return made_of + chosen
            for body, rule in ways:
                whole = rule if condition is None else Applied("and", (condition, rule))
                made_of += self.in_nest(body, axes, whole)
            return made_of
        if kind == "Evaluate" and self.is_without_effect(_word(s.value)):
            return []
        if kind == "Evaluate" and (width := _ADDITIONS.get(_word(s.value))):
            return [self.added(s.value, axes, condition, width)]
        if kind == "For" and s.thread_binding is None and int(s.kind) != _PARALLEL:
            return self.repeated(s, axes, condition)
        what = f"T.{_word(s.value)}" if kind == "Evaluate" else "a loop" if kind == "For" else kind
        raise self.refuse(f"a T.Parallel nest contains {what}; write it outside of the nest")

    def repeated(
        self, s: tirx.For, axes: tuple[tuple[str, int], ...], condition: Expression | None
    ) -> list[Elementwise | BoundValue]:
        """Return a short loop in parallel loops as its iterations, one after another."""
        self.annotated(dict(s.annotations or {}))
        first, count = self.number(s.min), self.number(s.extent)
        if count > _MOST_REPEATED:
            raise self.refuse(f"a T.Parallel nest contains a loop of {count} iterations; allowed: {_MOST_REPEATED}")
        result = list[Elementwise | BoundValue]()
        for n in range(first, first + count):
            self.variables[s.loop_var] = Literal(n)
            result += self.in_nest(s.body, axes, condition)
        return result

    def stored(
        self, s: tirx.BufferStore, axes: tuple[tuple[str, int], ...], condition: Expression | None
    ) -> Elementwise:
        indices = tuple(self.expression(i) for i in s.indices)
        return Elementwise(axes, self.buffer(s.buffer), indices, self.expression(s.value), condition, self.line)

    def added(
        self, node: tirx.Call, axes: tuple[tuple[str, int], ...], condition: Expression | None, width: int
    ) -> Elementwise:
        """Return an atomic addition to an element, or to ``width`` neighbours, as a loop over these elements."""
        pointer, value = node.args[:2]
        target = self.expression(pointer.args[0])
        read = self.expression(value.args[0] if width > 1 else value)
        if not isinstance(target, BufferElement):
            raise self.refuse("an atomic addition needs an element of a tensor as its target")
        indices, value_of = target.indices, read
        if width > 1:
            name = axes[-1][0] if axes else ""
            divided = [_without_factor(e, name, width) for e in (*indices[-1:], read)]
            first, second = divided
            if condition is not None or first is None or second is None or name in variables_of(indices[:-1]):
                raise self.refuse(f"an atomic addition of {width} neighbours needs {width} * {name} as its last index")
            indices, value_of = (*indices[:-1], first), second
            axes = (*axes[:-1], (name, width * axes[-1][1]))
        return Elementwise(axes, target.buffer, indices, value_of, condition, self.line, is_added=True)

    # ------------------------------------------------------------ calls
    def part(self, node: tirx.Call) -> BufferPart:
        """Return the part of a buffer that ``T.region(buffer[start], mode, extents)`` is."""
        load, extents = node.args[0], [self.number(x) for x in node.args[2:]]
        return BufferPart(self.buffer(load.buffer), tuple(self.expression(i) for i in load.indices), tuple(extents))

    def called(self, node: tirx.Call) -> tuple[Statement, ...]:
        """Return a call that is a statement."""
        word = _word(node)
        if self.is_without_effect(word):
            return ()
        known = dict(getattr(node, "annotations", None) or {})
        if word in _STEPS or "barrier" in known:
            return (self.at_barrier(word, node, known),)
        if word in ("wgmma_gemm", "async_copy") or int(known.get("wg_wait", 0)):
            self.unfinished = self.line
        if word in ("copy", "async_copy", "tma_copy") and len(node.args) == 2:
            self.annotated(known)
            return (part_as_nest(self.part(node.args[0]), self.part(node.args[1]), self.line),)
        if word == "fill":
            target = self.part(node.args[0])
            axes = tuple((f"#{i}", n) for i, n in enumerate(n for n in target.extent if n != 1))
            nest = part_as_nest(BufferPart(target.buffer, target.start, target.extent), target, self.line)
            (x,) = nest.body
            assert isinstance(x, Elementwise)
            filled = Elementwise(axes, x.buffer, x.indices, self.expression(node.args[1]), None, self.line)
            return (ParallelNest(axes, (filled,), self.line),)
        if word in ("gemm", "wgmma_gemm"):
            self.annotated({k: v for k, v in known.items() if str(k) != "use_2cta" or int(v)})
            a, b, c = (self.part(x) for x in node.args[:3])
            transposes = bool(int(node.args[3])), bool(int(node.args[4]))
            if int(node.args[8]):
                self.note(f"{self.line}: {_POLICY}{_ALONE}")
            if a.buffer is b.buffer:
                self.note(f"{self.line}: {BY_ITSELF}")
            return (MatrixProduct(a, b, c, transposes, self.expression(node.args[9]), self.line),)
        if word in ("reduce", "cumsum"):
            return (self.reduction(word, node, known),)
        if word == "atomicadd":
            self.annotated({k: v for k, v in known.items() if str(k) not in _OF_ADDITIONS})
            nest = part_as_nest(self.part(node.args[0]), self.part(node.args[1]), self.line)
            added = (replace(x, is_added=True) for x in nest.body if isinstance(x, Elementwise))
            return (replace(nest, body=tuple(added)),)
        if width := _ADDITIONS.get(word):
            x = self.added(node, (), None, width)
            return (ParallelNest((), (x,), self.line),)
        raise self.refuse(f"npusim has no rule for T.{word}")

    def is_without_effect(self, word: str) -> bool:
        """Return whether a call has no effect on values; a note names a call that has an effect on the time."""
        if word in _EVENTS:
            self.note(_EVENTS_NOTE)
        return word in _QUIET | _EVENTS

    def at_barrier(self, word: str, node: tirx.Call, known: dict[object, object]) -> BarrierStep:
        """Return a wait for a barrier, an arrival at it, or a copy after whose end a phase of the barrier ends."""
        load: tirx.BufferLoad = known.pop("barrier", None) if word == "tma_copy" else node.args[0]
        if type(load).__name__ != "BufferLoad" or str(load.buffer.data.name) not in self.barriers:
            raise self.refuse(f"T.{word} needs a barrier of T.alloc_barrier")
        if len(node.args) != (1 if word == "ptx_arrive_barrier" else 2):
            raise self.refuse(f"T.{word} with {len(node.args)} operands is not supported")
        parity = copy = None
        if word == "tma_copy":
            self.annotated({str(k): v for k, v in known.items()})
            copy = part_as_nest(self.part(node.args[0]), self.part(node.args[1]), self.line)
        elif known:
            raise self.refuse(f"T.{word} with {', '.join(sorted(map(str, known)))}")
        elif word == "mbarrier_wait_parity":
            parity = self.expression(node.args[1])
        return BarrierStep(str(load.buffer.data.name), self.expression(load.indices[0]), parity, copy, self.line)

    def reduction(self, word: str, node: tirx.Call, known: dict[object, object]) -> TileReduction:
        if known.pop("nan_propagate", None):
            raise self.refuse("nan_propagate of a reduction is not supported")
        self.annotated({str(k): v for k, v in known.items() if str(k) != "enable_fadd2"})
        source, target = self.part(node.args[0]), self.part(node.args[1])
        axis = int(node.args[3 if word == "reduce" else 2]) % len(source.extent)
        if word == "cumsum":
            if int(node.args[3]):
                raise self.refuse("T.cumsum(reverse=True) is not supported")
            return TileReduction(source, target, "sum", axis, True, self.line, cumulates=True)
        how = str(getattr(node.args[2], "value", node.args[2]))
        return TileReduction(source, target, how, axis, bool(int(node.args[4])), self.line)

    # ------------------------------------------------------------ expressions
    def expression(self, e: tirx.PrimExpr) -> Expression:
        """Return an expression."""
        kind = type(e).__name__
        if kind in ("int", "float", "bool"):
            return Literal(e, {"int": "int32", "float": "float32"}.get(kind, "bool"))
        if kind in ("IntImm", "FloatImm"):
            return Literal(int(e.value) if kind == "IntImm" else float(e.value), self.format(str(e.dtype)))
        if kind == "Var":
            return self.variable(e)
        if kind == "Div" and "float" in str(e.dtype):
            self.note(_LIBRARY_NOTE)
        if kind in _OF_TWO:
            return simpler(Applied(_OF_TWO[kind], (self.expression(e.a), self.expression(e.b))))
        if kind == "Not":
            return Applied("not", (self.expression(e.a),))
        if kind == "Select":
            return Applied("select", tuple(map(self.expression, (e.condition, e.true_value, e.false_value))))
        if kind == "Cast":
            return Applied("cast", (self.expression(e.value),), self.format(str(e.dtype)))
        if kind == "BufferLoad":
            return BufferElement(self.buffer(e.buffer), tuple(self.expression(i) for i in e.indices))
        if kind == "Call":
            return self.function_call(e)
        raise self.refuse(f"npusim has no rule for the expression {kind}: {e!s:.80}")

    def variable(self, e: tirx.Var) -> Expression:
        if e in self.variables:
            return self.variables[e]
        if e in self.deferred:
            return self.expression(self.deferred[e])
        if str(e.name) in self.sizes:
            return Literal(self.sizes[str(e.name)], "int32")
        raise self.refuse(f"no argument of the launch has the size {e.name}")

    def function_call(self, e: tirx.Call) -> Expression:
        word = _word(e)
        if word == "infinity":
            return Literal(math.inf, self.format(str(e.dtype)))
        if word in ("max_value", "min_value"):
            raise self.refuse(f"T.{word}")
        operands = tuple(self.expression(a) for a in e.args if type(a).__name__ != "StringImm")
        if word in ("likely", "tvm_thread_invariant"):
            return operands[0]
        if word == "if_then_else":
            return Applied("select", operands)
        if word == "reinterpret":
            return Applied(word, operands, self.format(str(e.dtype)))
        if word == "clamp":
            return Applied("min", (Applied("max", operands[:2]), operands[2]))
        if _CALLS_OF_TWO.get(word, _RENAMED.get(word, word)) in _OF_LIBRARY:
            self.note(_LIBRARY_NOTE)
        if word == "fast_rcp":
            raise self.refuse(
                "T.fast_rcp, an approximate instruction of the GPU, is not supported; write 1 / x, which is "
                "correctly rounded"
            )
        if word in _APPROXIMATE:
            self.note(f"{self.line}: T.{word} is an approximate function on a GPU; here it is T.{_RENAMED[word]}")
        if word in ("sigmoid", "ieee_frcp"):
            one, x = Literal(1.0, self.format(str(e.dtype))), operands[0]
            below = x if word != "sigmoid" else Applied("+", (one, Applied("exp", (Applied("-", (_ZERO, x)),))))
            return Applied("/", (one, below))
        if word in _CALLS_OF_TWO:
            return Applied(_CALLS_OF_TWO[word], operands[:2])
        return Applied(_RENAMED.get(word, word), operands)


_ZERO = Literal(0.0, "float32")
_NUMBERS = frozenset({"int", "float", "bool", "IntImm", "FloatImm"})
_GROUP = "warp_specialize"
#: Steps at a barrier of the program, in addition to copies that belong to a barrier.
_STEPS = frozenset({"mbarrier_wait_parity", "ptx_arrive_barrier"})
_SCOPES = frozenset({"shared", "shared.dyn", "local", "local.fragment", "local.var", "global"})
#: Neighbours to which an atomic addition in parallel loops adds.
_ADDITIONS: Mapping[str, int] = MappingProxyType(
    {"atomic_add_elem_op": 1, "atomic_addx2_elem_op": 2, "atomic_addx4_elem_op": 4}
)
#: Annotations of the addition of a part that change its execution, but not its value.
_OF_ADDITIONS = frozenset({"use_tma", "memory_order"})


def has_sums(body: Sequence[Statement]) -> bool:
    """Return whether statements, or statements inside them, add elements of a tile to a tensor."""
    inside = [
        (*s.then, *s.otherwise) if isinstance(s, Conditional) else s.body
        for s in body
        if isinstance(s, Conditional | SerialLoop)
    ]
    return any(isinstance(s, TileReduction) and s.word.endswith("sum") for s in body) or any(map(has_sums, inside))


def _chosen(
    condition: Expression, then: Sequence[Elementwise | BoundValue], otherwise: Sequence[Elementwise | BoundValue]
) -> list[Elementwise | BoundValue] | None:
    """Return the assignments of both branches of an if, which assign the same elements, as assignments that choose a
    value; None for other statements.
    """
    result = list[Elementwise | BoundValue]()
    if len(then) != len(otherwise):
        return None
    for a, b in zip(then, otherwise, strict=True):
        if isinstance(a, BoundValue) or isinstance(b, BoundValue) or a.is_added or b.is_added:
            return None
        if a.buffer is not b.buffer or a.buffer.is_global or (a.axes, a.indices) != (b.axes, b.indices):
            return None
        result.append(replace(a, value=chosen_value(condition, a.value, b.value)))
    return result


def _without_factor(e: Expression, name: str, factor: int) -> Expression | None:
    """Return an expression in which a variable replaces ``factor`` times the variable; None if the variable is also
    used in another way.
    """
    if e == Applied("*", (Variable(name), Literal(factor))):
        return Variable(name)
    if e == Variable(name):
        return None
    inside = e.operands if isinstance(e, Applied) else e.indices if isinstance(e, BufferElement) else ()
    if any(_without_factor(x, name, factor) is None for x in inside):
        return None
    return with_inner(e, lambda x: _without_factor(x, name, factor) or x)


def _word(node: tirx.Call) -> str:
    """Return the name of the function that a call calls, without the folders of its registry."""
    name = str(getattr(node.op, "name", node.op)) if type(node).__name__ == "Call" else type(node).__name__
    if name.endswith(("call_extern", "call_pure_extern")):
        return str(getattr(node.args[0], "value", node.args[0]))
    return name.rpartition(".")[2]


def _identifier(text: str) -> str:
    made = "".join(c if c.isalnum() and c.isascii() else "_" for c in text) or "_"
    return f"_{made}" if made[0].isdigit() else made


def _line_of(s: tirx.Stmt) -> Line | None:
    """Return the program's line from which a statement comes; None for statements of TileLang's own macros."""
    import tilelang
    from tilelang.ir import get_stmt_span

    span = get_stmt_span(s)
    if span is None or str(span.source_name.name).startswith(str(Path(tilelang.__file__).parent)):
        return None
    return Line(str(span.source_name.name), int(span.line))


def _first_line(s: tirx.Stmt) -> Line:
    """Return the first line that a statement, or one in it, has."""
    while s is not None:
        if (line := _line_of(s)) is not None:
            return line
        s = getattr(s, "body", None) or getattr(s, "block", None)
    return Line("", 0)
