"""A Triton kernel as a schedule: ``kernel.py::name[grid](arguments)``, with the launch in Python's form.

The launch is written in names of the problem: sizes (``batch``, ``heads``, ``kv_heads``, ``group``, ``seq_q``,
``seq_kv``, ``head_dim``, ``value_head_dim``, ``causal``, ``scale``, ``log2e``) and tensors (``q``, ``k``, ``v``,
``o``), each with ``.T``, ``.stride(axis)`` and ``.to(format)``.  Numbers given to constexprs, ``num_warps`` and
``num_stages`` become tiling fields.
"""

from __future__ import annotations

import ast
import inspect
import math
import operator
import re
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import chain, count
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from npusim.config.family import registered, running
from npusim.config.problem import KernelProblem, Problem
from npusim.config.tiling import Field, Tiling, with_fields
from npusim.errors import FormatError, ProgramError, SpecError, absent
from npusim.formats import ARITHMETICS, IEEE, VARIANTS
from npusim.formats.exponential import LOG2_E
from npusim.kernels.declare.define import schedule
from npusim.kernels.triton import launch_parts, short_kernel_name
from npusim.kernels.triton.calls import MOST_PROGRAMS
from npusim.kernels.triton.compiled_choices import UNKNOWN
from npusim.kernels.triton.compiler import OPTIONS, POINTERS, Compiled, Source, compiled, function_of, source_of
from npusim.kernels.triton.float64_walk import ExactLaunch, KnownLaunches
from npusim.kernels.triton.kernel_draft import Choices
from npusim.kernels.triton.latest_readings import blocks_of, is_checked
from npusim.kernels.triton.launch_phases import Check, LaunchGrid
from npusim.kernels.triton.reader import Reader
from npusim.kernels.triton.releases import untried
from npusim.kernels.triton.ttir_text import FORMATS, Line, read, refusing
from npusim.kernels.triton.values import AXES as TENSOR_AXES
from npusim.kernels.triton.values import Tensor, shaped
from npusim.machines.sm import compiled_loops, compiled_rows
from npusim.machines.sm.core import APPROXIMATE_ROOT, SM, code_architecture, counts_turnover, warp_issue
from npusim.units import ceil_div

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from npusim.config.device import DeviceSpec
    from npusim.config.problem import AnyProblem
    from npusim.kernels.attention.online_softmax import Accumulate
    from npusim.kernels.attention.tiling_mask import MaskKind
    from npusim.kernels.declare.define import Phases
    from npusim.kernels.declare.registry import Schedule
    from npusim.kernels.form.phase import Phase
    from npusim.machines.base import Machine

Used = TypeVar("Used")

#: A product in TTIR: its rows, the length of its sum, its columns.
_DOT = r"tt\.dot [^:]*:[^:]*?tensor<(\d+)x(\d+)x\w+> \* tensor<\d+x(\d+)x\w+>"
#: The first architecture for which Triton generates code for tensor cores: on sm_75, Triton 3.6 adds products up in
#: lanes.
TENSOR_CORES = 80
#: Triton's default of a launch, and the largest number of tiles in progress for which times of products are known.
STAGES, MOST_STAGES = 3, 4  # triton 3.6, CUDAOptions
AXES = "xyz"
#: log2 e in a kernel's float32.
LOG2_E32 = float(np.float32(LOG2_E))
#: ln 2 in CUDA's fast logarithm.
LN_2 = float(np.float32(math.log(2.0)))
_OPTIONS = MappingProxyType({"num_warps": 4, "num_stages": STAGES})  # triton 3.6, CUDAOptions


def options_of(warps: int, stages: int) -> Mapping[str, object]:
    """Return the defaults of a launch's options that Triton's compiler uses, if a machine has such fields."""
    field = Field(
        default=stages,
        ge=min(OPTIONS["num_stages"]),
        le=max(OPTIONS["num_stages"]),
        json_schema_extra={"also": "num_stages"},
        description=(
            f"stages of loops in Triton's compiler; the time of loops with products has at most {MOST_STAGES} tiles in "
            "progress"
        ),
    )
    return {"warps": warps, "stages": (int, field)}


def takes_options(tiling: Tiling) -> bool:
    """Return whether a tiling has the options of Triton's compiler."""
    return {"warps", "stages"} <= type(tiling).model_fields.keys()


_FUNCTIONS: Mapping[str, Any] = MappingProxyType(
    {"cdiv": ceil_div, "next_power_of_2": lambda n: 1 << (int(n) - 1).bit_length(), "min": min, "max": max}
    | {"int": int, "float": float, "sqrt": math.sqrt, "log2": math.log2}
)
#: Largest number of parts of an expression, and largest integer in one: an argument of a launch has 64 bits.
MOST_PARTS, LARGEST = 300, 2**63 - 1
_BINARY: Mapping[str, Callable[[Any, Any], Any]] = MappingProxyType(
    {"Add": operator.add, "Sub": operator.sub, "Mult": operator.mul, "Div": operator.truediv, "Mod": operator.mod}
    | {"FloorDiv": operator.floordiv, "Pow": operator.pow, "LShift": operator.lshift, "RShift": operator.rshift}
)
_OPERATORS = ast.BinOp | ast.UnaryOp | ast.operator | ast.unaryop | ast.Compare | ast.cmpop | ast.BoolOp | ast.boolop
_NODES = (
    _OPERATORS | ast.Expression | ast.Constant | ast.Name | ast.Load | ast.IfExp | ast.Call | ast.Attribute | ast.Tuple
)
_ATTRIBUTES = ("T", "stride", "to")
_FORM = (
    "kernel.py::name[grid](arguments), as `fa[cdiv(seq_q, 64), batch * heads](q, k, v, o, scale * log2e, D=head_dim)`"
)


@dataclass(frozen=True, slots=True)
class TritonPrecision:
    """Choices that TTIR leaves open, by name.

    exp_variant
        The implementation of a power of two; ``exp.*``: as e^(x ln 2), if a unit has no other.
    functions
        The origin of the implementations of other functions and of divisions of float32, by the operation of TTIR
        (`FUNCTIONS`); ``correct``: correctly rounded.  On GPUs ``tl.sqrt`` and ``/`` are approximate instructions, and
        ``tl.sqrt_rn`` and ``tl.div_rn`` are correct.
    sum_order
        Order of a row's sum; empty: the order of NVIDIA's code according to its layouts (``mma_lanes`` if Triton
        compiles none), otherwise the device's order.
    accumulate
        ``chained``: the matrix unit adds to the accumulator; ``fresh``: the product is computed alone, and an addition
        follows.
    contracts
        Whether multiplications and additions become one operation, as they do by default in NVIDIA's compilers.
    arithmetic
        The arithmetic of matrix units; empty: the device's.
    is_exact
        Whether all values are float64: this is the kernel's algorithm without rounding, the reference for its errors.
    """

    name: str
    exp_variant: str = "exp2.correct"
    functions: str = "correct"
    sum_order: str = ""
    accumulate: Accumulate = "chained"
    contracts: bool = True
    arithmetic: str = ""
    is_exact: bool = False

    def formats(self) -> dict[str, str]:
        """Return no formats: the kernel states them."""
        return {}


EXACT = TritonPrecision("exact", sum_order="sequential", contracts=False, arithmetic="ieee.f64", is_exact=True)
TURNS = "depth=0: the kernel uses a state before and after a product, so that no stage can run tiles ahead of another"
#: What libdevice's ``floorf`` and ``ceilf`` round: subnormal numbers are 0 (measured on an H200).
_FLUSHED = "where(compare({size}, 1.1754943508222875e-38, 'olt'), {x} * 0.0, {x})"
UNCOUNTED_RETURNS = "the time leaves out programs that return early: the device file has no cost for them"
_ON_GPUS = ("compiled", "unfused")
#: Functions of float32 by their origin: their forms by the operation of TTIR, or by the symbol of a library.
FUNCTIONS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "correct": {},
        "cuda": {
            "__nv_expf": "exp({}, 'exp.libdevice')",
            "__nv_fast_log2f": "log({}, 'log2.correct')",
            "__nv_fast_logf": f"(log({{}}, 'log2.correct') * {LN_2!r})",
            "math.ceil": _FLUSHED,
            "math.floor": _FLUSHED,
            "math.log": "log({}, 'log.libdevice')",
            "math.log2": "log({}, 'log2.libdevice')",
            "math.log1p": "log({}, 'log1p.libdevice')",
            "math.rsqrt": "rsqrt({}, 'rsqrt.hopper_approx')",
            "math.sqrt": f"sqrt({{}}, {APPROXIMATE_ROOT!r})",
            "math.erf": "erf({}, 'erf.libdevice')",
            "math.tanh": "tanh({}, 'tanh.libdevice')",
            "arith.divf": "divided({}, {}, 'div.hopper_full')",
        },
        "ascend_c": {"math.erf": "erf({}, 'erf.ascend_c')"},
    }
)
#: The origins among them whose code clamps float32 between a number and its opposite by the smaller magnitude.
BY_MAGNITUDE = ("cuda",)
#: Compute capability (times ten) on which GPUs' functions were measured, and the note of a run on other GPUs.
MEASURED_FUNCTIONS = 90
ASSUMED_FUNCTIONS = (
    "the GPU's float32 exponentials, roots, logarithms and divisions are assumed to have the bits of an H200's"
)
#: Units that differ only in the order along k; empty: the device's own.
_IN_ORDER = re.compile(r"(?:mma_(?:half|quad)\.k\d+)?")
TWO_ORDERS = (
    "the compiler issues some products of {} with k ascending and others in turns (mma.sync of factors that are "
    "narrower in memory, or joined); npusim adds all of them with k ascending, and the last places of a chip's float32 "
    "sums can differ"
)
PRECISIONS: Mapping[str, tuple[TritonPrecision, ...]] = MappingProxyType(
    {"gpu": tuple(TritonPrecision(n, "exp2.hopper_ex2", "cuda", contracts=n == "compiled") for n in _ON_GPUS)}
    | {"npu": (TritonPrecision("ascend", "exp.correct", "ascend_c", accumulate="fresh", contracts=False),)}
    | {"cpu": (TritonPrecision("plain", contracts=False), EXACT)}
)


class Launch(NamedTuple):
    """A kernel with its grid and arguments as text, by parameter; ``reference``: a function of its file in float64."""

    source: Source
    grid: str
    arguments: Mapping[str, str]
    constants: tuple[tuple[str, Any], ...]
    options: Mapping[str, int]
    reference: str = ""

    @property
    def is_plain(self) -> bool:
        """Whether its tensors are plain tensors, not those of an attention."""
        return any(re.search(r"\btensor\(", text) for text in self.arguments.values())


def load(name: str) -> tuple[Schedule, ...]:
    """Return the schedule for ``kernel.py::name[grid](arguments)``, one for each core family.

    Raises `SpecError` if there is no such file or kernel, or if the launch does not fit the kernel's parameters.
    """
    path = Path(launch_parts(name)[0])
    if not path.is_file():
        raise SpecError(f"{path}: {absent(path)}; a Triton kernel is {_FORM}")
    return _load(name, str(path.resolve()), path.stat().st_mtime_ns)


@lru_cache(maxsize=64)  # of launches
def _load(name: str, path: str, changed: int) -> tuple[Schedule, ...]:
    launches = tuple([launch_of(text.strip(), path, changed) for text in launch_parts(name)[1].split(";")])
    launch, called = launches[-1], short_kernel_name("_".join(each.source.name for each in launches))
    fields = dict[str, tuple[Any, str]]()
    for each in launches:
        for n, value in each.constants:
            if n in fields and fields[n][0] != value:
                raise SpecError(
                    f"{path}: constexpr {n} is {fields[n][0]} in one launch and {value} in another: rename one of them"
                )
            fields[n] = value, f"constexpr of {each.source.name}"
    for family in running("compiled"):
        base = registered(family).fields_of("compiled")
        if twice := fields.keys() & (base or Tiling).model_fields.keys():
            at = f"{path}:{launch.source.line}"
            raise SpecError(f"{at}: constexpr {min(twice)}: a tiling field has that name; rename it")

    return schedule(
        called,
        partial(phases_of, launches),
        precisions=PRECISIONS,
        tiling=with_fields(called.title(), fields),
        kind="compiled",
        usual=options_of(launch.options["num_warps"], launch.options["num_stages"]),
        origin=f"{path}:{launch.source.line}",
        problem=KernelProblem if any(each.is_plain for each in launches) else Problem,
        summary=f"Triton's {called}",
        **_reference(launches),
        exact=partial(_exact, launch) if launch.is_plain and len(launches) == 1 else None,
        is_stated=True,
    )


def triton(function: Any, launch: str) -> str:
    """Return the name of a Triton kernel for `run`, `explore` and the other verbs.

    ``function``: a ``@triton.jit`` function, or the text ``kernel.py::name``; ``launch``: ``[grid](arguments)`` in
    names of the problem, as in `npusim help triton`.

    Examples
    --------
    >>> triton("kernel.py::fa", "[seq_q // 64, batch * heads](q, k, v, o, D=head_dim)")
    'kernel.py::fa[seq_q // 64, batch * heads](q, k, v, o, D=head_dim)'
    """
    if isinstance(function, str):
        return function + launch
    plain = getattr(function, "fn", function)
    return f"{inspect.getsourcefile(plain)}::{plain.__name__}{launch}"


def launch_of(text: str, path: str, changed: int) -> Launch:
    """Return a launch for its text, ``name[grid](arguments)``."""
    wanted = text.partition("[")[0].partition("(")[0].strip()
    source = source_of(path, wanted, changed)
    try:
        call = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        why = (
            error.msg
            if isinstance(error, SyntaxError)
            else (f"this is not an expression of at most {MOST_PARTS} parts")
        )
        raise SpecError(f"{_shortened(text)}: {why}; a launch is {_FORM}") from None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Subscript):
        listed = ", ".join(p.name for p in source.parameters)
        raise SpecError(f"{wanted}: a launch needs its grid and arguments, {wanted}[grid]({listed}); {_FORM}")
    names = [p.name for p in source.parameters]
    at = f"{path}:{source.line}: {wanted}"
    if any(isinstance(a, ast.Starred) for a in call.args) or any(k.arg is None for k in call.keywords):
        raise SpecError(f"{at}: arguments are given one by one, not by * or **; {_FORM}")
    given: dict[str, str] = {}
    for name, value in (*zip(names, call.args, strict=False), *((k.arg or "", k.value) for k in call.keywords)):
        if name in given:
            raise SpecError(f"{at}: {name} has two values, {given[name]} and {ast.unparse(value)}; write one")
        given[name] = _written(at, name, value)
    # As in Triton, an option that is also a parameter has one value for both.
    options = {n: _option(at, n, given.get(n, default)) for n, default in _OPTIONS.items()}
    given = {n: text for n, text in given.items() if n not in _OPTIONS or n in names}
    reference = given.pop("reference", "") if "reference" not in names else ""
    if unknown := [n for n in given if n not in names] or (len(call.args) > len(names) and ["one argument more"]):
        raise SpecError(f"{at} has no parameter {unknown[0]}; its parameters are {', '.join(names)}")
    for p in source.parameters:
        if p.name not in given and not p.default:
            raise SpecError(f"{path}:{p.line}: {wanted}: parameter {p.name} has no argument: {p.name}=...")
        given.setdefault(p.name, p.default)
    constants = {p.name: v for p in source.parameters if p.is_constexpr and (v := _plain(given[p.name])) is not None}
    grid = _written(at, "grid", call.func.slice)
    return Launch(source, grid, given, tuple(constants.items()), options, reference)


def _shortened(text: str) -> str:
    return repr(text if len(text) <= MOST_PARTS else f"{text[:MOST_PARTS]}...")


def _written(at: str, name: str, node: ast.expr) -> str:
    if sum(1 for _ in ast.walk(node)) > MOST_PARTS:
        raise SpecError(f"{at}: {name}: the expression has more than {MOST_PARTS} numbers, names and operators")
    return ast.unparse(node)


def _option(at: str, name: str, text: object) -> int:
    known = {str(n): n for n in OPTIONS[name]}
    if (value := str(text)) not in known:
        raise SpecError(f"{at}: {name}={_shortened(value)}: allowed: {', '.join(known)}")
    return known[value]


def _plain(text: str) -> Any:
    """Return the number or word of a text; None for an expression of the problem."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, TypeError):
        return None
    return value if isinstance(value, int | float | str) else None


def phases_of(launches: tuple[Launch, ...], problem: Any, tiling: Any, p: TritonPrecision, machine: Any) -> Phases:
    """Return the phases of launches on a problem's tensors; the warps and stages of the tiling are those of the last
    launch.
    """
    _refuse_unused(launches, problem)
    names, phases = names_of(problem), list[Any]()
    for launch in launches:
        names |= {n: getattr(tiling, n) for n, _ in launch.constants}
        fields = tiling
        if launch is not launches[-1] and takes_options(tiling):
            own = {"warps": launch.options["num_warps"], "stages": launch.options["num_stages"]}
            fields = tiling.model_copy(update=own)
        *before, result = _phase_of(launch, names, problem, fields, p, machine)
        phases += before
        phase, *more = result if isinstance(result, tuple) else (result,)
        if launch is not launches[-1]:
            phase = replace(phase, name=f"{phase.name} {len(phases) + 1}", is_named=True)
        phases.append((phase, *more) if more else phase)
    return phases


def arguments_of(launch: Launch, names: dict[str, Any]) -> dict[str, Any]:
    """Return a launch's arguments by parameter; the launch's own tensors are added to ``names`` under the names of
    their parameters.
    """
    arguments, constants = dict[str, Any](), dict(launch.constants)
    for q in launch.source.parameters:
        value = names[q.name] if q.name in constants else evaluated(launch, q.name, names)
        at = f"{launch.source.name}: {q.name}"
        if not isinstance(value, Tensor | int | float | str | None):
            raise SpecError(f"{at}: must be a tensor or a number, got {value!r}")
        if isinstance(value, int) and abs(value) > LARGEST:
            raise SpecError(f"{at}: a whole number of more than 64 bits; allowed: -{LARGEST} to {LARGEST}")
        if isinstance(value, Tensor) and value.fmt not in POINTERS:
            raise SpecError(f"{at}: a pointer to {value.fmt}; allowed: {', '.join(POINTERS)}")
        if isinstance(value, Tensor) and (launch.is_plain or not value.name) and names.get(value.name) != value:
            # An earlier launch may have a tensor of that name.
            numbered = chain([q.name], (f"{q.name}{i}" for i in count(2)))
            free = next(n for n in numbered if not isinstance(names.get(n), Tensor))
            names[free] = value = replace(value, name=free)
        arguments[q.name] = value
    return arguments


def _phase_of(
    launch: Launch, names: dict[str, Any], problem: Any, tiling: Any, p: TritonPrecision, machine: Any
) -> list[Any]:
    options = launch.options
    if takes_options(tiling):
        options = {"num_warps": tiling.warps, "num_stages": tiling.stages}
    place = launch.source.name, Line(launch.source.path, launch.source.line)
    result, arguments, grid = compiled_launch(
        launch,
        names,
        options,
        architecture_of(machine.device),
        lambda ttir, on, grid: check_read(ttir, *place, on, grid, problem, tiling, p, machine),
    )
    if p.is_exact:
        exact = {n: replace(value, fmt="float64") for n, value in arguments.items() if isinstance(value, Tensor)}
        arguments |= exact
    return phase_read(result, *place, arguments, grid, problem, tiling, p, machine)


def compiled_launch(
    launch: Launch,
    names: dict[str, Any],
    options: Mapping[str, int],
    architecture: str,
    check: Callable[..., None] | None = None,
) -> tuple[Compiled, dict[str, Any], tuple[int, ...]]:
    """Return the code that Triton compiles for a launch, the launch's arguments by parameter, and its grid.

    Arguments and grid are checked before Triton compiles; with ``check``, TTIR, arguments and grid are also checked
    before it generates code.
    """
    arguments, words = arguments_of(launch, names), dict[str, object]()
    for q in launch.source.parameters:
        value = arguments[q.name]
        is_constant = q.is_constexpr or isinstance(value, bool | str | None)
        words[q.name] = value.fmt if isinstance(value, Tensor) else (value,) if is_constant else value
    grid = _grid(launch, names)
    checked = None if check is None else lambda ttir: check(ttir, arguments, grid)
    return compiled(launch.source, code_architecture(architecture), words, options, checked), arguments, grid


def _capability(device: DeviceSpec) -> int:
    return int(device.architecture.rpartition("_")[2] or 0) if _is_gpu(device) else 0


def _is_gpu(device: DeviceSpec) -> bool:
    return registered(device.family).processor == "gpu"


def architecture_of(device: DeviceSpec) -> str:
    """Return the architecture for which Triton generates code; empty if it generates none, or none for tensor cores."""
    return device.architecture if _capability(device) >= TENSOR_CORES else ""


def code_of(device: DeviceSpec) -> str:
    """Return the architecture whose machine code a device runs, by its name in Triton's tools; empty in the
    same cases.
    """
    return code_architecture(architecture_of(device))


def phase_read(
    made: Compiled,
    name: str,
    line: Line,
    arguments: Mapping[str, Any],
    grid: tuple[int, ...],
    problem: AnyProblem,
    tiling: Tiling,
    p: TritonPrecision,
    machine: Any,
) -> list[Any]:
    """Return the phases of a compiled kernel, the last one with its fields if it has any; refuse a phase at its line.

    Before the last phase there may be one that computes a factor of it.
    """
    device, is_gpu = machine.device, _is_gpu(machine.device)
    fuses = is_gpu and p.contracts and (made.fuses or bool(made.further) or not architecture_of(device))
    order, orders = ("mma_lanes", made.orders) if is_gpu and not p.sum_order else ("", {})
    of_code = {"addends": made.addends, "sums": made.sums, "further": made.further}
    choices = _choices(p, device, fuses=fuses, order=order, orders=orders, **of_code)

    def phases(every: Sequence[LaunchGrid]) -> list[Any]:
        named = [(f"{name} {i}", blocks) for i, blocks in enumerate(every[1:], 2)]
        in_turn = (*named, (name, every[0]))
        each = [_phases_of(made, n, x, problem, tiling, p, machine) for n, x in in_turn]
        for (_, blocks), of in zip(in_turn[1:], each[1:], strict=True):
            of[0] = _joined(of[0]) if blocks.code_share < 1 else of[0]
        return [one for of in each for one in of]

    with refusing(line, name):
        check = partial(
            _check_phases, problem=problem, kind=machine.mask_kind(tiling), p=p, keeps=machine.keeps_factors
        )
        return _of_blocks(phases, check, made.ttir, arguments, grid, choices)


def _of_blocks(
    use: Callable[[list[LaunchGrid]], Used],
    check: Check,
    ttir: str,
    arguments: Mapping[str, Any],
    grid: tuple[int, ...],
    choices: Choices,
) -> Used:
    """Return ``use`` of the blocks of a launch: those of the first way that can read it, or, if they cannot be used,
    those of the first way whose blocks pass a check.
    """
    blocks = blocks_of(ttir, arguments, grid, choices)
    try:
        return use(blocks)
    except ProgramError as fault:
        with suppress(ProgramError):
            return use(blocks_of(ttir, arguments, grid, choices, check))
        raise fault from None


def _check_phases(
    every: Sequence[LaunchGrid], problem: AnyProblem, kind: MaskKind | None, p: TritonPrecision, *, keeps: bool
) -> None:
    """Raise `ProgramError` for blocks that have no phases."""
    for blocks in every:
        blocks.phases(problem, kind, p, keeps_factors=keeps)


def check_read(
    ttir: str,
    name: str,
    line: Line,
    arguments: Mapping[str, Any],
    grid: tuple[int, ...],
    problem: AnyProblem,
    tiling: Tiling,
    p: TritonPrecision,
    machine: Machine,
) -> None:
    """Raise `ProgramError` for a kernel that cannot be read, whatever its compiler chooses; this is done before code is
    generated.
    """
    choices = _choices(p, machine.device, fuses=p.contracts, order="mma_lanes")
    with refusing(line, name):
        check = partial(
            _check_phases, problem=problem, kind=machine.mask_kind(tiling), p=p, keeps=machine.keeps_factors
        )
        _of_blocks(check, check, ttir, arguments, grid, choices)


def _phases_of(
    made: Compiled, name: str, blocks: LaunchGrid, problem: AnyProblem, tiling: Tiling, p: TritonPrecision, machine: Any
) -> list[Any]:
    """Return the phases of the blocks of a launch, the last one with its fields if it has any."""
    device, is_gpu = machine.device, _is_gpu(machine.device)
    keeps = machine.keeps_factors
    *before, phase = blocks.phases(problem, machine.mask_kind(tiling), p, keeps_factors=keeps)
    phase = replace(phase, name=name, is_named=True) if blocks.number else phase
    decided = (made.choices if architecture_of(device) else UNKNOWN) if is_gpu else ""
    notes = (*phase.notes, *filter(None, [untried()]))
    arithmetic = p.arithmetic or (_of_half_sums(blocks.reader, made, device) if is_gpu else "")
    by_format = {} if arithmetic or not is_gpu else _of_code(blocks.reader, made, device)
    if unordered := [] if arithmetic or not is_gpu else _in_two_orders(blocks.reader, made):
        decided, notes = UNKNOWN, (*notes, *map(TWO_ORDERS.format, unordered))
    phase = replace(phase, arithmetic=arithmetic, arithmetic_by_format=by_format, compiled=decided, notes=notes)
    measured = ("hopper", "libdevice") if is_gpu and _capability(device) != MEASURED_FUNCTIONS else ()
    variants = {r.attributes.variant.partition(".")[2] for s in phase.stages for r in s.rows}
    if any(variant.startswith(measured) for variant in variants if variant):
        phase = replace(phase, notes=(*phase.notes, ASSUMED_FUNCTIONS))
    if blocks.reader.returned and not (machine.has_groups and counts_turnover(device)):
        phase = replace(phase, notes=(*phase.notes, UNCOUNTED_RETURNS))
    if machine.has_groups:
        phase, lies = _told(name, phase, made, tiling, machine, blocks.at_once)
        programs, returned = blocks.reader.programs, blocks.reader.returned
        lies = compiled_rows.with_code(lies, made.body, phase, programs, device, returned, blocks.code_share)
        return [*before, (phase, compiled_loops.with_loops(lies, made.loops, phase, device))]
    if "depth" not in tiling.model_fields_set and not blocks.piece:
        turns = machine.in_turns(name, phase, tiling)
        if turns is not None:
            return [*before, (replace(phase, notes=(*phase.notes, TURNS)), turns)]
    if not blocks.piece or not device.is_timed:
        return [*before, phase]
    fields, _ = machine.compiled(name, phase, tiling, made.down, blocks.piece)
    return [*before, (phase, fields)]


def _joined(one: Phase | tuple[Phase, object]) -> Phase | tuple[Phase, object]:
    """Return a phase, with its fields if it has any, as a part of the launch of the phase before."""
    if isinstance(one, tuple):
        phase, fields = one
        return replace(phase, is_joined=True), fields
    return replace(one, is_joined=True)


def _of_half_sums(reader: Reader, made: Compiled, device: DeviceSpec) -> str:
    """Return the arithmetic of products that a GPU adds up in float16 (``out_dtype=tl.float16``); empty: float32.

    Raises `ProgramError` if only some products are added up so, or if the unit has no such arithmetic.
    """
    formats = {a for a, total, _ in reader.products if total == "f16"}
    if not formats:
        return ""
    units = {_arithmetic_of(FORMATS[a], reader, made, device) for a in formats}
    half = {f"{unit.rpartition('.')[0]}.f16" for unit in units}
    if len(half) > 1 or not half <= ARITHMETICS.keys() or any(total != "f16" for _, total, _ in reader.products):
        why = "only some products accumulate in float16, or their format has no such arithmetic"
        raise ProgramError(f"{reader.line}: {reader.function.name}: {why} on {device.name}; set out_dtype=tl.float32")
    return half.pop()


def _of_code(reader: Reader, made: Compiled, device: DeviceSpec) -> dict[str, str]:
    """Return the arithmetic of products by format, for formats in which compiled code does not use the device's own
    arithmetic.
    """
    formats = {FORMATS[a] for a, _, _ in reader.products}.difference(_in_two_orders(reader, made))
    chosen = {fmt: _arithmetic_of(fmt, reader, made, device) for fmt in sorted(formats) if _units(fmt, reader, made)}
    return chosen | ({"float32": IEEE} if reader.precision == "ieee" else {})


def _arithmetic_of(fmt: str, reader: Reader, made: Compiled, device: DeviceSpec) -> str:
    """Return the arithmetic of a GPU's products in compiled code; raise `ProgramError` if it is not known."""
    name = device.matrix_engine(SM).arithmetic_of(fmt)
    if not (units := _units(fmt, reader, made)):
        return name
    architecture, _, _, formats = name.split(".", 3)
    unit = units.pop() if len(units) == 1 else UNKNOWN
    if (of_code := f"{architecture}.{unit}.{formats}") not in ARITHMETICS:
        why = (
            f"products of {fmt} that the compiler issues as two different instructions, or as one whose "
            f"arithmetic is not known ({unit})"
        )
        why += (
            "; allowed: the same max_num_imprecise_acc for all of them: 32, 64, 128, none, or more than a tile's depth"
        )
        if depth := re.search(r"k(\d+)/", unit):
            why += f"; for factors of such narrow elements, tiles with a depth of {int(depth[1]) // 2} or more"
        raise ProgramError(f"{reader.line}: {reader.function.name}: {why} on {device.name}")
    return of_code


def _in_two_orders(reader: Reader, made: Compiled) -> list[str]:
    """Return the formats, other than FP8, of products that compiled code adds along k in several known orders."""
    every = {fmt: _units(fmt, reader, made) for fmt in {FORMATS[a] for a, _, _ in reader.products}}
    several = (fmt for fmt, units in every.items() if len(units) > 1 and all(map(_IN_ORDER.fullmatch, units)))
    return sorted(fmt for fmt in several if not fmt.startswith("float8"))


def _units(fmt: str, reader: Reader, made: Compiled) -> set[str]:
    """Return the units of a kernel's products of a format in compiled code; none if all of them are the device's own.

    A product whose place compiled code does not name has the unit of all others, ``?`` if these differ.  ``?`` also
    stands for factors of FP8 that an instruction reads in another format, if the device's own unit reads them so.
    """
    if not made.units:
        return set()
    first, *more = {(read, unit) for read, unit in made.units.values()}
    found = set[str]()
    for place in (at for a, _, at in reader.products if FORMATS[a] == fmt):
        read, unit = made.units.get(place, ("", UNKNOWN) if more else first)
        is_widened = fmt.startswith("float8") and not read.startswith("f8")
        found.add(unit or UNKNOWN * is_widened)
    return found if any(found) else set()


def _choices(p: TritonPrecision, device: DeviceSpec | None = None, **of_code: Any) -> Choices:
    """Return the choices of a precision, of a device, and of compiled code in the form of the reader.

    ``tl.exp`` has subnormal results; ``tl.exp2`` and ``fast_expf`` have zeros in their place if the variant names a
    second form.
    """
    base, _, variant = p.exp_variant.partition(".")
    subnormal = f"{variant}_subnormal" if f"{variant}_subnormal" in VARIANTS[base] else variant
    exp2, exp = f"exp({{}}, {p.exp_variant!r})", f"exp({{}} * {LOG2_E32!r}, '{base}.{subnormal}')"
    fast = f"exp({{}} * {LOG2_E32!r}, {p.exp_variant!r})"
    if base != "exp2":
        exp2, exp, fast = f"exp({{}} * {math.log(2.0)!r}, {p.exp_variant!r})", exp2, exp2
    forms = {"math.exp2": exp2, "math.exp": exp, "__nv_fast_expf": fast, **FUNCTIONS[p.functions]}
    choices = Choices(p.accumulate == "fresh", False, forms, is_exact=p.is_exact)
    if device is not None:
        multiplied = frozenset(fmt for unit in device.matrix_engines.values() for fmt in unit.arithmetic)
        choices = replace(choices, multiplied=multiplied, converts_wide=_is_gpu(device) and not p.is_exact)
    return replace(choices, clamps_by_magnitude=p.functions in BY_MAGNITUDE, **of_code)


def read_as(
    ttir: str,
    name: str,
    line: Line,
    arguments: Mapping[str, Any],
    grid: tuple[int, ...],
    p: TritonPrecision,
    check: Check | None = None,
) -> list[LaunchGrid]:
    """Return the blocks of a launch with the choices of a precision; raise `ProgramError` for a kernel that cannot be
    read.

    ``check``: as in `npusim.kernels.triton.launch_ways.launched`.
    """
    with refusing(line, name):
        return blocks_of(ttir, arguments, grid, _choices(p, fuses=p.contracts), check)


def exact_launch(
    ttir: str, name: str, line: Line, arguments: Mapping[str, Any], grid: tuple[int, ...], problem: AnyProblem
) -> ExactLaunch:
    """Return the results of a launch in float64, with the tensors that the launch has in its program."""
    of = ttir, name, line, arguments, grid
    check: Check | None = None
    if is_checked(ttir, grid):
        check = partial(_check_phases, problem=problem, kind=None, p=EXACT, keeps=True)
    blocks = read_as(*of, EXACT, check)
    known = [ExactLaunch(*x.known, [x], partial(list, [x])) for x in blocks if x.known is not None]
    if known:
        return KnownLaunches(known)
    return ExactLaunch(
        read(ttir), arguments, grid, blocks, partial(read_as, *of, replace(EXACT, accumulate="fresh"), check)
    )


def _exact(launch: Launch, problem: KernelProblem, tiling: Tiling) -> ExactLaunch:
    names = names_of(problem) | {n: getattr(tiling, n) for n, _ in launch.constants}
    result, arguments, grid = compiled_launch(launch, names, launch.options, "")
    line = Line(launch.source.path, launch.source.line)
    return exact_launch(result.ttir, launch.source.name, line, arguments, grid, problem)


def _grid(launch: Launch, names: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the number of programs along each of three axes; raise `SpecError` for a value that is not a grid."""
    wanted = evaluated(launch, "grid", names)
    grid = wanted if isinstance(wanted, tuple) else (wanted,)
    is_whole = all(isinstance(n, int) and 1 <= n <= LARGEST for n in grid)
    if not is_whole or not 1 <= len(grid) <= len(AXES) or math.prod(grid) > MOST_PROGRAMS:
        count = f", {math.prod(grid):,} programs" if is_whole and grid else ""
        allowed = f"one to three whole numbers from 1, at most {MOST_PROGRAMS:,} programs in all"
        raise SpecError(f"{launch.source.name}: grid={launch.grid}{count}; allowed: {allowed}")
    return (*grid, *(1 for _ in AXES[len(grid) :]))


def _refuse_unused(launches: tuple[Launch, ...], problem: Any) -> None:
    """Raise `SpecError` for a size that no expression of a launch uses: a misspelt size would be ignored without a
    message.
    """
    texts = [text for launch in launches for text in (launch.grid, *launch.arguments.values())]
    used = {n.id for text in texts for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Name)}
    for name in getattr(problem, "sizes", {}):
        if name not in used:
            known = {p.name for launch in launches for p in launch.source.parameters} | {"tensor", "workspace"}
            sizes = ", ".join(sorted(used - _FUNCTIONS.keys() - known | used & problem.sizes.keys()))
            called = " and ".join(launch.source.name for launch in launches)
            raise SpecError(f"problem: {called} has no size {name!r}; the sizes in its launch: {sizes or 'none'}")


def _reference(launches: tuple[Launch, ...]) -> dict[str, Any]:
    if not (reference := launches[-1].reference):
        return {}
    rows = partial(reference_rows, launches)
    setattr(rows, "__name__", reference)  # noqa: B010 - a partial has none, and results say it
    return {"reference": rows}


def reference_rows(
    launches: tuple[Launch, ...], problem: KernelProblem, output: Any, inputs: Any, _tiling: Any
) -> np.ndarray[Any, Any]:
    """Return the reference result of the last launch, (batch, heads, rows, columns) in float64.

    The reference is called with the kernels' arguments that it names: tensors in float64, in the launches' shapes.
    """
    names, given, launch = names_of(problem), dict[str, Any](), launches[-1]
    for each in launches:
        names |= dict(each.constants)
        given |= arguments_of(each, names)
    by_name = {t.name: t for t in output.inputs}
    for n, value in given.items():
        if isinstance(value, Tensor) and (t := by_name.get(value.name)):
            heads = [inputs(t.name, b, h) for b in range(t.batch) for h in range(t.heads)]
            heads = [(x.T if t.is_transposed else x)[:: t.shared_rows] for x in heads]
            given[n] = np.concatenate(heads).reshape(value.called)
    function = function_of(launch.source.path, launch.reference)
    takes = inspect.signature(function).parameters
    if unknown := [n for n in takes if n not in given]:
        raise SpecError(
            f"reference: {launch.reference} has a parameter {unknown[0]}, which {launch.source.name} does not have"
        )
    result = np.asarray(function(**{n: given[n] for n in takes}), np.float64)
    return result.reshape(output.batch, output.heads, output.seq_q, output.output_cols)


def _told(name: str, phase: Any, made: Compiled, tiling: Any, machine: Any, at_once: int) -> Any:
    """Return the phase with the compiler's results for it: stages, registers, shared memory.

    ``at_once``: number of tiles that it loads as one block; 0 if it loops over tiles.
    """
    stages = re.findall(r"tt\.num_stages = (\d+)", made.ttir)
    is_staged = warp_issue(machine.device).copies.value == "staged"
    count = int(stages[0]) if stages else tiling.stages
    most = MOST_STAGES if any(s.is_product for s in phase.stages) else count
    told: dict[str, Any] = {"stages": 1 if is_staged else min(most, count)}
    if made.registers and tiling.registers is None:
        told |= {"registers": made.registers, "spilled_registers": made.spilled, "shared_bytes": made.shared_bytes}
        told |= {"spilled_accesses": made.moved}
    fields = tiling.model_copy(update=told)
    lies, note = machine.compiled(name, machine.ordered(phase, fields), fields, made.down)
    note = note.replace("as given", f"of the compiler ({made.made_by})") if "registers" in told else note
    if made.registers and lies.decided.generation == "wgmma":
        lies = replace(lies, decided=lies.decided._replace(is_serial=made.is_serial))
    lies = replace(lies, widths={**_whole_tile(phase, made.ttir), **lies.widths})
    if at_once and machine.device.flags:
        most = machine.device.flags.usable_event_ids_count.value // len(phase.tensors)
        loaded = max(lies.decided.loaded_tiles, min(at_once, most))
        lies = replace(lies, decided=lies.decided._replace(loaded_tiles=loaded))
    return replace(phase, notes=(*phase.notes, *filter(None, [note]))), lies


def _whole_tile(phase: Phase, ttir: str) -> dict[str, int]:
    """Return, by axis, the sizes of a product's tile that a mask shortens; the code computes the complete tile.

    None for a phase, or a kernel, with more than one product.
    """
    products, dots = [s.rows[0] for s in phase.stages if s.is_product], re.findall(_DOT, ttir)
    if len(products) != 1 or len(dots) != 1:
        return {}
    (row,), (m, k, n) = products, map(int, dots[0])
    row_axis, column_axis = phase.names[row.dst].axes
    (sum_axis,) = {*phase.names[row.srcs[0]].axes} - {row_axis}
    whole = {row_axis: m, sum_axis: k, column_axis: n}
    if any(phase.sizes[axis] > size for axis, size in whole.items()):  # the phase computes the transpose of the product
        return {}
    return {axis: size for axis, size in whole.items() if phase.sizes[axis] < size and axis != phase.loop_axis}


def names_of(problem: Any) -> dict[str, Any]:
    """Return the names that a launch's expressions may use, with their values for a problem."""
    p = problem.attention
    if p is None:
        result = partial(_tensor, problem.dtype)
        return {"log2e": LOG2_E, **problem.sizes, "tensor": result, "workspace": partial(result, is_workspace=True)}
    for name, filled in zip(("head_dim", "value_head_dim"), p.filled, strict=True):
        if filled:
            why = (
                "is not a multiple of 16, and a launch passes tensors without padding; declare the tensor with "
                "tensor(...)"
            )
            raise SpecError(f"{name}: {getattr(p, name) - filled} {why}")
    b, h, g = p.batch, p.heads, p.kv_heads

    def tensor(name: str, heads: int, rows: int, cols: int) -> Tensor:
        strides = (heads * rows * cols, cols, 1, heads * cols, 1) if p.layout == "bsnd" else ()
        return Tensor(name, shaped((b, heads, rows, cols)), p.dtype, strides=strides)

    return {
        **{n: getattr(p, n) for n in ("batch", "heads", "kv_heads", "seq_q", "seq_kv", "head_dim", "value_head_dim")},
        "causal": p.causal,
        "scale": p.scale,
        "group": h // g,
        "log2e": LOG2_E,
        "q": tensor("q", h, p.seq_q, p.head_dim),
        "k": tensor("k", g, p.seq_kv, p.head_dim),
        "v": tensor("v", g, p.seq_kv, p.value_head_dim),
        "o": tensor("o", h, p.seq_q, p.value_head_dim),
        "workspace": partial(_tensor, p.dtype, is_workspace=True),
    }


def _tensor(dtype: str, *shape: int, is_workspace: bool = False) -> Tensor:
    if not 1 <= len(shape) <= len(TENSOR_AXES) or any(not isinstance(n, int) or n < 1 for n in shape):
        raise ValueError(f"tensor{shape}: one to five whole numbers, positive")
    if len(shape) == len(TENSOR_AXES) and not is_workspace:
        raise ValueError(f"tensor{shape}: only a workspace has five axes, one of them for splits")
    return Tensor("", shaped(shape), dtype, rank=len(shape), is_workspace=is_workspace)


def evaluated(launch: Launch, what: str, names: Mapping[str, Any]) -> Any:
    """Return an argument of a launch, or its grid; raise `SpecError` for a text that is not an expression of
    the names.
    """
    text = launch.grid if what == "grid" else launch.arguments[what]
    tree = ast.parse(text, mode="eval")
    for node in ast.walk(tree):
        is_known = isinstance(node, _NODES) and not (isinstance(node, ast.Attribute) and node.attr not in _ATTRIBUTES)
        if isinstance(node, ast.Name) and node.id not in names and node.id not in _FUNCTIONS:
            listed = ", ".join(sorted(names))
            raise SpecError(f"{launch.source.name}: {what}={text}: there is no {node.id!r}; allowed names: {listed}")
        if not is_known:
            raise SpecError(
                f"{launch.source.name}: {what}={text}; allowed: sums and products of numbers and of "
                "names of the problem"
            )
    code = compile(ast.fix_missing_locations(_Bounded().visit(tree)), "<launch>", "eval")
    try:
        return eval(code, {"__builtins__": {"_operation": _operation}}, {**_FUNCTIONS, **names})
    except (ArithmeticError, AttributeError, TypeError, ValueError, IndexError, KeyError, FormatError) as error:
        raise SpecError(f"{launch.source.name}: {what}={text}: {error}") from None


class _Bounded(ast.NodeTransformer):
    """Lets `_operation` compute the operators of an expression."""

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        name, function = ast.Constant(type(node.op).__name__), ast.Name("_operation", ast.Load())
        return ast.Call(function, [name, self.visit(node.left), self.visit(node.right)], [])


def _operation(name: str, a: Any, b: Any) -> Any:
    """Return a sum, a product or a power of two numbers; raise `ValueError` for numbers beyond 64 bits."""
    if name not in _BINARY or not all(isinstance(x, int | float) for x in (a, b)):
        raise TypeError("an operation must have two numbers and one of + - * / // % ** << >>")
    whole = [abs(x) for x in (a, b) if isinstance(x, int)]
    if max(whole, default=0) > LARGEST or (name in ("Pow", "LShift") and len(whole) == len((a, b)) and b >= 64):
        raise ValueError("a whole number of more than 64 bits")
    return _BINARY[name](a, b)
