"""The one place where numerics and timing meet: a request in, a :class:`RunResult` out.

Options of :func:`run`
----------------------
hw, workload
    Names of packaged files, paths, or the loaded objects; ``hw`` None: the device the schedule is for.
problem
    The problem itself, in place of a workload.
seq, seq_q, seq_kv, batch, tensor_parallel, causal, dtype
    Replace what the workload says; with ``tensors`` the sizes come from them.
ignore
    What of the workload's attention may be left out: ``window``, ``softcap``, ... (`Workload.left_out`);
    a run refuses a workload that needs what is not modelled, unless it is named here.
tiling
    Fields of the schedule's tiling; the others keep their defaults.
precision
    Name of one of the schedule's presets, its fields changed if wanted:
    ``"fa2_fp32,exp_variant=exp2.exp2p,accumulate=fresh"``.
arithmetic
    Registry name of the matrix arithmetic, in place of the device's own.
tensors, prefix
    Q, K and V: a file, the name of packaged data, or a mapping of arrays, with keys ``q k v`` or
    ``<prefix>.q ...``; by default they are drawn from the workload's recipe with ``seed``.  With
    ``dtype="float8_e4m3fn"`` they are quantised, one scale a tensor.
layout
    Order of the tensors' axes: ``bnsd`` (batch, heads, tokens, head size), ``bsnd``, ``bsh`` or
    ``tnd``; all but the first have heads within a token in memory too.
numerics, rows, heads
    Whether bits are computed, and for which query rows (their whole Q blocks) and heads.
method
    How time is computed; names are those of ``npusim.timing.METHODS``.
trace_groups
    Core groups whose operations are kept for the timeline.
overrides
    ``{dotted key of the device file: value}``.
diagnose
    Whether bits come with ranges, resonance, underflow and saturation (``numerics.diagnosis``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from npusim.errors import SpecError
from npusim.finite import finite_choices
from npusim.ir.check import FlagBudget, check
from npusim.numerics.evaluate import Choice, evaluate
from npusim.numerics.inputs import array_source, recipe_source
from npusim.run_node import refuse, run_on_node, time_on_node
from npusim.run_result import RunResult
from npusim.schedules import default_hw, find_schedule
from npusim.spec.load import load_workload
from npusim.spec.node import NodeDevice, is_node, load_machine
from npusim.spec.problem import Problem
from npusim.spec.tiling import Tiling, build_tiling
from npusim.spread import row_sum_evidence, spread_over_alternates
from npusim.tensors import Layout, load_tensors, quantise
from npusim.timing import METHODS
from npusim.timing.sanity import check_sanity

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from numpy.typing import NDArray

    from npusim.ir.program import TileProgram
    from npusim.numerics.result import NumericResult
    from npusim.schedules import Schedule
    from npusim.schedules.precision import Precision
    from npusim.spec.device import DeviceSpec
    from npusim.spec.kernels import AnyProblem
    from npusim.spec.problem import Dtype
    from npusim.spec.workload import Workload
    from npusim.timing.result import TimingResult

DEFAULT_HW = "ascend_910b2"
DEFAULT_WORKLOAD = "pangu_38b"


def run(
    schedule: str,
    *,
    hw: str | Path | DeviceSpec | None = None,
    workload: str | Path | Workload = DEFAULT_WORKLOAD,
    problem: AnyProblem | None = None,
    seq: int | None = None,
    seq_q: int | None = None,
    seq_kv: int | None = None,
    batch: int | None = None,
    tensor_parallel: int | None = None,
    causal: bool | None = None,
    dtype: Dtype | None = None,
    ignore: Collection[str] = (),
    tiling: Mapping[str, object] | Tiling | None = None,
    precision: str | None = None,
    arithmetic: str | None = None,
    tensors: str | Path | Mapping[str, NDArray[Any]] | None = None,
    prefix: str = "",
    layout: Layout = "bnsd",
    numerics: bool = True,
    rows: Choice = "sample",
    heads: Choice = "sample",
    seed: int | None = None,
    method: str = "auto",
    trace_groups: Sequence[int] = (0,),
    overrides: Mapping[str, str] | None = None,
    diagnose: bool = False,
) -> RunResult:
    """Predict bits and cycles of one schedule on one device; the module explains the options.

    Raises a subclass of `NpusimError` that says what is wrong: `SpecError`, `TilingError`, ...
    """
    load = load_workload(workload) if isinstance(workload, str | Path) else workload
    hw = default_hw(schedule, DEFAULT_HW) if hw is None else hw
    sizes: dict[str, Any] = {"seq": seq, "seq_q": seq_q, "seq_kv": seq_kv, "batch": batch, "dtype": dtype}
    sizes["tensor_parallel"] = tensor_parallel
    if problem is not None:
        refuse({**sizes, "causal": causal, "ignore": ignore or None}, "the problem given says them; leave these options out")
    if is_node(hw):
        values = {"tensors": tensors, "arithmetic": arithmetic, "seed": seed}
        refuse(values, "a node's run computes no attention; use it on one device")
        return run_on_node(
            schedule, hw=cast("Any", hw), load=load, problem=problem, tiling=tiling, precision=precision, method=method,
            sizes={**sizes, "causal": causal}, ignore=ignore, trace_groups=trace_groups, overrides=overrides, numerics=numerics,
        )  # fmt: skip
    device = load_machine(hw, overrides)
    chosen = find_schedule(schedule, device.family)
    given, scales = _tensors(load, tensors, prefix, layout, dtype)
    sizes["dtype"] = None if scales else dtype
    what = _stored(_seeded(problem or _problem(load, given, sizes, causal), seed), layout, scales)
    ignored = load.ignored(what.seq_kv, ignore) if problem is None and isinstance(what, Problem) else ()
    fields = tiling if isinstance(tiling, Tiling) else build_tiling(chosen.tiling, tiling or {})
    preset = chosen.precision(",".join(filter(None, (precision, _as_change(arithmetic)))))
    plan = _Plan(chosen, what, fields, device, preset)
    program = plan.checked_program()
    timing = simulate_program(program, device, method, trace_groups) if device.is_timed else None
    bits, more = _evaluate(plan, program, given, rows, heads, diagnose=diagnose) if numerics else (None, {})
    return RunResult(
        name=_name(schedule, load, what), schedule=schedule, precision=preset.name, formats=preset.formats(),
        device=device, workload=load.name, inputs=_inputs(tensors, what), problem=what, tiling=fields,
        program=program, timing=timing, numerics=bits, notes=_notes(program, device, bits, timing, trace_groups),
        ignored=ignored, **more
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Plan:
    """What is to be run, resolved: enough to build the program, with another precision too."""

    schedule: Schedule
    problem: AnyProblem
    tiling: Tiling
    device: DeviceSpec
    precision: Precision

    def checked_program(self) -> TileProgram:
        program = self.program()
        check(program, flag_budget(self.device))
        return program

    def program(self, changes: Mapping[str, str] | None = None) -> TileProgram:
        """Return the program, with fields of the precision changed."""
        precision: Any = replace(cast("Any", self.precision), **(changes or {}))
        return self.schedule.program(self.problem, self.tiling, self.device, precision)


def _as_change(arithmetic: str | None) -> str | None:
    return arithmetic and f"arithmetic={arithmetic}"


def _evaluate(
    plan: _Plan,
    program: TileProgram,
    given: Mapping[str, NDArray[Any]] | None,
    rows: Choice,
    heads: Choice,
    *,
    diagnose: bool,
) -> tuple[NumericResult | None, dict[str, Any]]:
    """Return the bits of an attention program, and fields of the result that say more of them."""
    problem = plan.problem
    if not isinstance(problem, Problem):
        return None, {}
    source = recipe_source(problem) if given is None else array_source(given, problem.data)
    bits = evaluate(program, problem, source, rows=rows, heads=heads, diagnose=diagnose)
    spread = spread_over_alternates(bits, problem, source, plan.device, plan.program)
    finite = finite_choices(bits, plan.schedule, plan.tiling, problem, source, plan.device)
    return bits, {"spread": spread, "finite": finite}


def _tensors(
    load: Workload, tensors: str | Path | Mapping[str, NDArray[Any]] | None, prefix: str, layout: Layout,
    dtype: Dtype | None,
) -> tuple[Mapping[str, NDArray[Any]] | None, dict[str, float]]:  # fmt: skip
    """Return the tensors given, or those that the workload's recipe changes, and their scales."""
    if tensors is not None:
        found = load_tensors(tensors, prefix=prefix, layout=layout, head_dim=load.head_dim)
    elif load.tensors is None or not load.data.changes_tensors:
        return None, {}
    else:
        found = load_tensors(load.tensors.file, prefix=load.tensors.prefix)
    return quantise(found) if dtype == "float8_e4m3fn" else (found, {})


def _stored(problem: AnyProblem, layout: Layout, scales: Mapping[str, float]) -> AnyProblem:
    """Return the problem with its inputs' arrangement in memory and their scales."""
    if not isinstance(problem, Problem) or (layout == "bnsd" and not scales):
        return problem
    return problem.model_copy(update={"layout": "bnsd" if layout == "bnsd" else "bsnd", **scales})


def _seeded(problem: AnyProblem, seed: int | None) -> AnyProblem:
    """Return the problem with another seed for its inputs."""
    if seed is None or not isinstance(problem, Problem):
        return problem
    if "seed" not in type(problem.data).model_fields:
        raise SpecError(f"seed: inputs of kind {problem.data.kind} are not drawn; leave it out")
    if seed < 0:
        raise SpecError(f"seed: {seed} must be at least 0")
    data = problem.data.model_copy(update={"seed": seed})
    return problem.model_copy(update={"data": data})


def _inputs(tensors: object, problem: AnyProblem) -> str:
    """Return what the inputs are, for the record."""
    if isinstance(tensors, str | Path):
        return str(tensors)
    if tensors is not None:
        return "arrays given"
    if isinstance(problem, Problem):
        seed = getattr(problem.data, "seed", None)
        return problem.data.kind if seed is None else f"{problem.data.kind}, seed {seed}"
    return "none"


def _name(schedule: str, load: Workload, problem: AnyProblem) -> str:
    """Return the name of a run: of its folder, and in comparisons."""
    if isinstance(problem, Problem):
        return f"{schedule}-{load.name}-{problem.seq_kv}"
    return f"{schedule}-{problem.flops() or 'bytes'}"


def flag_budget(device: DeviceSpec) -> FlagBudget | None:
    """Return how many flags the device has, for ``ir.check``; None where its file does not say."""
    flags = device.flags
    if flags is None:
        return None
    return FlagBudget(
        flags.event_ids_per_pair_count.value,
        flags.cross_core_ids_count.value,
        flags.cross_core_counter_max_count.value,
    )


def _problem(
    load: Workload,
    given: Mapping[str, NDArray[Any]] | None,
    sizes: Mapping[str, Any],
    causal: bool | None,
) -> Problem:
    if given is None:
        return load.problem(causal=causal, **sizes)
    q, k, v = (given[name] for name in ("q", "k", "v"))
    refuse(sizes, "sizes come from the tensors given; leave these options out")
    return load.problem(
        batch=q.shape[0], heads=q.shape[1], kv_heads=k.shape[1], seq_q=q.shape[2], seq_kv=k.shape[2],
        head_dim=q.shape[3], value_head_dim=v.shape[3], causal=causal, dtype=cast("Dtype", str(q.dtype)),
    )  # fmt: skip


def simulate_program(
    program: TileProgram, device: DeviceSpec, method: str, trace_groups: Sequence[int] = ()
) -> TimingResult:
    """Return the time of a program by a named method, checked for sanity.

    Raises `SpecError` for an unknown method, `ProgramError` for a result that cannot be.
    """
    if method not in METHODS:
        raise SpecError(f"method {method!r}: there are {', '.join(METHODS)}")
    if isinstance(device, NodeDevice):
        return time_on_node(program, device, method, trace_groups)
    result = METHODS[method](program, device, trace_groups=trace_groups)
    check_sanity(result)
    return result


def _notes(
    program: TileProgram, device: DeviceSpec, bits: NumericResult | None, timing: TimingResult | None,
    trace_groups: Sequence[int],
) -> tuple[str, ...]:  # fmt: skip
    notes = list(program.notes)
    if timing and trace_groups and not timing.spans and timing.operations:
        notes.append(
            f"no timeline: {timing.operations:,} operations were not simulated one by one; method fold does that"
        )
    if bits is not None:
        notes += [
            f"matrix arithmetic {name} is assumed: no public bit-level source"
            for name, evidence in bits.arithmetic.items()
            if evidence == "assumed"
        ]
        notes += [
            f"order of row sums {order} is assumed: {device.row_sum.source}"
            for order, evidence in row_sum_evidence(bits, device).items()
            if device.row_sum is not None and evidence == "assumed"
        ]
    return tuple(notes)
