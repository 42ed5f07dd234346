"""Resolves a request into a plan once; devices and nodes both run plans."""

from __future__ import annotations

from dataclasses import field, fields, replace
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from npusim.config.head_scores import GivenBias
from npusim.config.layers import ModelProblem
from npusim.config.node_file import NodeDevice, NodeSpec
from npusim.config.problem import CopyProblem, GemmProblem, LayerProblem, Problem, SharedProblem
from npusim.config.tiling import Tiling
from npusim.config.workload import shared_heads
from npusim.errors import SpecError
from npusim.formats import get_format
from npusim.kernels.declare.define import machine_of
from npusim.late_methods import dataclass
from npusim.library import find_schedule, is_of_models
from npusim.program.numerics.evaluate import SAMPLE_ROWS, chosen, chosen_heads, indices
from npusim.program.timing import method_named
from npusim.simulation.figures import figures
from npusim.simulation.request import CALL, LAST, OPTIONS, refuse
from npusim.simulation.tensor_files import (
    check_finite,
    chosen_tensors,
    kernel_tensors,
    load_projection,
    unlikely_reading,
)
from npusim.units import ceil_div, format_duration, format_value

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from numpy.typing import NDArray

    from npusim.config.device import DeviceSpec
    from npusim.config.problem import AnyProblem
    from npusim.config.workload import Workload
    from npusim.kernels.declare.node_define import PartialSums
    from npusim.kernels.declare.registry import ExactResults, Precision
    from npusim.library import Schedule
    from npusim.machines.base import Machine
    from npusim.program.ir.tile_program import TileProgram
    from npusim.program.numerics.evaluate import Choice, References
    from npusim.program.numerics.executor import HeadSource
    from npusim.simulation.evaluation import Subject
    from npusim.simulation.request import Groups, Request
    from npusim.simulation.tensor_files import Tensors

#: Seconds in which the bits of a (query, key) pair are computed with head sizes of 128 (measured: 0.1 to 0.65 us,
#: depending on the schedule).
PAIR_S = 0.4e-6
#: Seconds in which a block is built, checked and timed by a method that simulates equal work only once.
BLOCK_S = 60e-6
#: Seconds for each operation, with methods that simulate every operation.
OPERATION_S = MappingProxyType({"des": 25e-6, "block": 1e-6})
#: Number of operations of a tile of queries and keys: both matrix products, and the operations between them.
TILE_OPERATIONS = 60
_TILE = 128


@dataclass(frozen=True, slots=True)
class Plan:
    """A resolved run: everything that is needed to build its program, also with another precision.

    ``device`` is a `NodeDevice` for a run on a node, or for a model on one device. ``tensors`` are the user's Q, K and
    V, None if the problem's recipe draws them; ``projection`` is the user's W_o of a layer, if any.
    """

    request: Request
    schedule: Schedule
    device: DeviceSpec
    features: frozenset[str]
    workload: Workload
    problem: AnyProblem
    tiling: Tiling
    precision: Precision
    tensors: Tensors | None
    projection: NDArray[Any] | None
    ignored: tuple[str, ...]
    #: A note on the layout in which the tensors were read, if another layout is likelier.
    reading: str = ""
    #: Whether fields of the tiling that are not named are chosen (`npusim.simulation.chosen_tile`) or have their
    #: declared values.
    is_open: bool = False
    #: Data that are computed once: the references of all presets, the inputs that a problem's recipe draws, and results
    #: of references of plain tensors by tiling.
    exact: References = field(default_factory=dict, repr=False, compare=False)
    sources: dict[Subject, HeadSource] = field(default_factory=dict, repr=False, compare=False)
    exact_programs: dict[str, TileProgram] = field(default_factory=dict, repr=False, compare=False)
    exact_rows: dict[Tiling, ExactResults] = field(default_factory=dict, repr=False, compare=False)
    exact_results: dict[Tiling, NDArray[Any]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def machine(self) -> Machine:
        """The machine of the device or node, the same object for all plans of the device."""
        result: Machine = machine_of(self.device)
        return result

    def program(self, changes: Mapping[str, str] | None = None) -> TileProgram:
        """Return the program, with fields of the precision changed; raise `SpecError` for a field that it does not
        have.
        """
        precision: Any = self.precision
        if changes and not changes.keys() <= {f.name for f in fields(precision)}:
            raise SpecError(f"precision {precision.name}: has no field {', '.join(changes)}")
        precision = replace(precision, **(changes or {}))
        return self.schedule.program(self.problem, self.tiling, self.device, precision)


def device_of(request: Request) -> DeviceSpec:
    """Return the device or node of a request; for a model, a single device is a node of one."""
    device = request.machine()
    return NodeDevice.alone(device) if is_of_models(request.schedule) else device


def target_of(
    request: Request, *, has_bits: bool, is_bare: bool = False
) -> tuple[Schedule, DeviceSpec, frozenset[str]]:
    """Return the schedule and the device or node of a request, and those conditions of `NEEDS` that its run fulfils.

    Raises `SpecError` for options that have no effect on the run.  ``has_bits``: whether the run or its caller computes
    bits; ``is_bare``: whether the caller does.  A caller may compute bits of plain tensors, although runs compute none.
    """
    r, device = request, device_of(request)
    method_named(r.method)
    is_one = machine_of(device).node is None
    schedule = find_schedule(r.schedule, device.family)
    conditions = {
        "workload": r.problem is None,
        "model": r.problem is None or "model" in r.problem.features,
        "device": is_one,
        "time": not is_one or device.is_timed,
        "tensors": r.tensors is not None,
        "bits": has_bits and (schedule.has_bits or (is_bare and schedule.problem.is_plain)),
        "drawn": r.tensors is None or not is_one,  # a node draws W_o
    }
    features = frozenset(name for name, is_met in conditions.items() if is_met)
    features |= schedule.problem.features & {"attention", "plain"}
    features |= {"plain"} if schedule.problem.is_plain and "bits" in features else set()
    request.refuse_unread(features, schedule.sizes)
    return schedule, device, features


def plan_of(request: Request, *, is_bare: bool = False) -> Plan:
    """Return the plan of a request; raise a subclass of `NpusimError` that states the fault of the request.

    ``is_bare``: without bits and timeline, for callers that compute bits themselves.
    """
    schedule, device, features = target_of(request, has_bits=is_bare or request.numerics, is_bare=is_bare)
    workload = request.load()
    if is_bare:
        request = replace(request, numerics=False, diagnose=False, presets=False, trace_groups=())
    if request.dtype is None and request.problem is None and request.tensors is None:
        # the format for which the schedule is written, if there is one
        request = replace(request, dtype=schedule.inputs(device))
    scales, stated, reading = dict[str, float](), dict[str, Any](), ""
    if request.problem is not None and request.problem.is_plain:
        tensors = kernel_tensors(request)
    else:
        tensors, scales, stated = chosen_tensors(request, workload)
        reading = unlikely_reading(tensors, request.layout) if tensors is not None and request.tensors else ""
    projection, node = None, machine_of(device).node
    if node is not None:
        heads = None if isinstance(request.heads, str) and request.heads in ("sample", "all") else request.heads
        refuse({"heads": heads}, "a node's ranks run all heads; remove this option")
        projection = load_projection(request.tensors, request.tensor_prefix, tensors)
    problem = request.problem or _problem_of(request, schedule, workload, node, tensors, projection, stated)
    problem = schedule.sized(problem)
    problem = (problem if request.seed is None else problem.with_seed(request.seed)).stored_as(request.layout, scales)
    if tensors is not None and not problem.is_plain:
        where = request.tensors if isinstance(request.tensors, str | Path) else "tensors"
        check_finite(tensors, problem.attention, where)
    if "bias" in stated:
        bias = cast("Tensors", tensors)["bias"]
        problem = problem.with_bias(GivenBias(bias, sha256(bias.tobytes()).hexdigest()), stated["bias"])
    named = request.changed_precision()
    if node is not None and not named and len(schedule.precisions) > 1:
        named = str(getattr(problem, "dtype", "float16"))  # partial sums in the format of the inputs
    precision = schedule.precision(named)
    if node is not None:
        problem = _part_of_layer(schedule, problem, node, cast("PartialSums", precision).partial)
    tiling = schedule.tiled(request.chosen_tiling(schedule.tiling))
    if node is None:
        schedule.check_kind(problem)
        tiling = schedule.declared(tiling, device, problem, precision)
    ignored: tuple[str, ...] = ()
    if request.problem is None and "model" in problem.features:
        ignored = workload.ignored(request.ignore, schedule.models)
    is_open = node is None and not isinstance(request.tiling, Tiling)
    inputs = tensors, projection, ignored, reading
    return Plan(request, schedule, device, features, workload, problem, tiling, precision, *inputs, is_open)


def _problem_of(
    request: Request,
    schedule: Schedule,
    workload: Workload,
    node: NodeSpec | None,
    tensors: Tensors | None,
    projection: NDArray[Any] | None,
    stated: Mapping[str, Any],
) -> Problem:
    """Return a workload's attention on one device, or its layer on a node, or the attention of the given tensors."""
    sizes, ranks, local = request.sizes(), None, None
    if schedule.is_of_decoding and tensors is None:
        sizes["is_absorbed"] = True
    if node is not None:
        ranks = sizes.pop("tensor_parallel") or node.device_count.value
    if tensors is None:
        sizes |= {} if ranks is None else {"tensor_parallel": ranks}
        attention = workload.problem(**sizes)
        if request.kind is None and len(workload.kinds) > 1:
            local = workload.problem(**{**sizes, "kind": "local"})
    else:
        # The tensors have already been rounded.
        attention = problem_of_tensors(workload, tensors, {**sizes, "dtype": None}, ranks or 1, stated)
    if not ranks:
        return attention
    kind = schedule.problem if issubclass(schedule.problem, SharedProblem) else LayerProblem
    return layer_problem(workload, attention, ranks, kind, projection, local)


def layer_problem(
    workload: Workload,
    attention: Problem,
    ranks: int,
    kind: type[SharedProblem] = LayerProblem,
    projection: NDArray[Any] | None = None,
    local: Problem | None = None,
) -> SharedProblem:
    """Return a workload's layer on ``ranks`` devices; ``attention``: that of one device.

    ``projection``: weights that determine the layer's width; ``local``: attention of the model's local layers.

    Raises `SpecError` if the workload does not state its width, or another size of a model's layers.
    """
    if not issubclass(kind, LayerProblem):
        return kind.around(attention, ranks=ranks)
    hidden = workload.hidden if projection is None else projection.shape[1]
    if hidden is None:
        raise SpecError(f"workload {workload.name}: hidden: missing; the output projection needs it")
    if kind is not ModelProblem:
        return kind.around(attention, ranks=ranks, hidden=hidden)
    return workload.model(attention, ranks, local).model_copy(update={"hidden": hidden})


def problem_of_tensors(
    workload: Workload,
    tensors: Tensors,
    sizes: Mapping[str, Any],
    devices: int = 1,
    stated: Mapping[str, Any] = MappingProxyType({}),
) -> Problem:
    """Return the problem of one of ``devices`` that share the heads of the given tensors; ``stated``: lengths and page.

    ``sizes`` may state visible keys and functions of scores.  Raises `SpecError` for other sizes, and if the devices
    cannot share the heads equally.
    """
    q, k, v = (tensors[name] for name in ("q", "k", "v"))
    sizes_of_call = {n: sizes[n] for n in ("causal", "ignore", "kind", *CALL) if n in sizes and n not in stated}
    others = {n: value for n, value in sizes.items() if n not in (*sizes_of_call, *stated, "lengths")}
    refuse(others, "the tensors already have the sizes; remove these options")
    heads, kv_heads = shared_heads(q.shape[1], k.shape[1], devices)
    call = dict(stated)
    call |= {} if call.get("lengths") else {"batch": q.shape[0], "seq_kv": k.shape[2]}
    return workload.problem(
        **call,
        heads=heads,
        kv_heads=kv_heads,
        seq_q=q.shape[2],
        head_dim=q.shape[3],
        value_head_dim=v.shape[3],
        **sizes_of_call,
        dtype=str(q.dtype),
    )


def _part_of_layer(schedule: Schedule, problem: AnyProblem, node: NodeSpec, fmt: str) -> AnyProblem:
    """Return the problem of a node schedule: the requested one, or the part of a layer that it runs.

    ``fmt`` is the format of the partial sums, which a collective transfers.  Raises `SpecError` for another kind of
    problem, or for a layer on fewer than all devices.
    """
    devices, kind = node.device_count.value, schedule.problem
    if isinstance(problem, LayerProblem) and not issubclass(kind, SharedProblem):
        if problem.ranks != devices:
            raise SpecError(
                f"tensor_parallel: {problem.ranks} ranks, but {schedule.name} runs on all {devices} devices of "
                f"{node.name}; for fewer: -C device_count={problem.ranks}"
            )
        if kind is CopyProblem:
            return CopyProblem(bytes=problem.rows * problem.hidden * get_format(fmt).size_bytes)
        return GemmProblem(m=problem.rows, n=problem.hidden, k=problem.width, dtype=problem.dtype)
    if not isinstance(problem, kind):
        words = {CopyProblem: "bytes", GemmProblem: "m, n and k"}.get(cast("Any", kind), "a layer of a workload")
        raise SpecError(f"problem: {schedule.name} needs {words}, not a {type(problem).__name__}")
    return problem


# ---------------------------------------------------------------- duration of a run itself A rough estimate (within a
# factor of three on one core of a machine of 2026): it distinguishes a minute from an hour, so that a run whose length
# is a mistake is refused before it takes a night.


def estimate(
    problem: AnyProblem, tiling: Tiling, method: str, bits: tuple[Choice, Choice] | None
) -> Mapping[str, float]:
    """Return the estimated seconds by purpose: ``program``, ``time``, ``bits``.

    ``bits`` are the rows and heads whose bits are computed, or None.  Products and copies are too short for
    an estimate: the result is empty.
    """
    attention = problem.attention
    if attention is None:
        return {}
    sizes = dict(tiling)
    rows, keys = (int(sizes.get(name) or sizes.get("block") or _TILE) for name in ("block_q", "block_kv"))
    each = attention.batch * ceil_div(attention.seq_q, rows)
    blocks = attention.heads * (sum(ceil_div(n, rows) for n in attention.queries) if attention.lengths else each)
    tiles = attention.heads * attention.pairs() / (rows * keys)
    seconds = {"program": blocks * BLOCK_S}
    seconds["time"] = OPERATION_S.get(method, 0.0) * TILE_OPERATIONS * max(tiles, blocks)
    if bits is not None:
        sizes_of_128 = (attention.head_dim + attention.value_head_dim) / 256
        seconds["bits"] = _pairs(attention, rows, *bits) * PAIR_S * (sizes_of_128 + 1) / 2
    return seconds


def traced_groups(choice: Choice, count: int) -> Groups:
    """Return the core groups on the timeline, from their number; ``last`` is known only after the simulation."""
    return LAST if choice == LAST else indices("trace_groups", choice, count, f"{LAST}, or ") if choice else ()


def without_effect(plan: Plan, seconds: float, seconds_on: Callable[[DeviceSpec], float | None]) -> Iterator[str]:
    """Yield a note for each changed number of the device that does not change the time of the run's tile.

    ``seconds_on`` returns the time of the run's program on another device.
    """
    changed = {name: getattr(plan.request, name) or {} for name in ("overrides", "scale")}

    def without(change: tuple[str, str]) -> float | None:
        name, key = change
        others = {name: {k: v for k, v in changed[name].items() if k != key}}
        return seconds_on(device_of(replace(plan.request, **cast("dict[str, Any]", others))))

    # If no tile fits without the change, the change has an effect.
    for (name, key), other in figures([(name, key) for name, of in changed.items() for key in of], without):
        if other == seconds:
            option = min(OPTIONS[name].names, key=len)
            same = "this run has the same time with the number in the device file"
            yield f"{option} {key}={format_value(changed[name][key])} changes no time here: {same}"


def refuse_beyond(limit_s: float | None, seconds: Mapping[str, float]) -> None:
    """Raise `SpecError` with the estimate and cheaper options if the estimate is longer than ``limit_s``."""
    total = sum(seconds.values())
    if limit_s is None or total <= limit_s:
        return
    most = max(seconds, key=lambda part: seconds[part])
    less = {
        "program": "fewer or shorter sequences (--batch, --seq)",
        "time": "--method auto",
        "bits": "--rows sample, --heads, or --no-numerics",
    }[most]
    spent = {"program": "building the program", "time": "its time", "bits": "its bits"}[most]
    raise SpecError(
        f"this run would take about {format_duration(total)} (an estimate; {spent} "
        f"{seconds[most] / total * 100:.0f} % of it), more than {format_duration(limit_s)}; to reduce it: {less}; "
        "to run it anyway: --force"
    )


def _pairs(problem: Problem, block: int, rows: Choice, heads: Choice) -> float:
    """Return the number of (query, key) pairs of the chosen heads and rows, including all rows of their blocks."""
    count = len(chosen_heads(problem, heads))
    which = chosen("rows", rows, problem.seq_q)
    if which == "all":
        return count * problem.pairs()
    if which == "sample":
        return count * min(block, SAMPLE_ROWS, problem.seq_q) * problem.key_count
    return count * len({row // block for row in which}) * min(block, problem.seq_q) * problem.key_count
