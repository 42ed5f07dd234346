"""The construction of schedules from algorithms, for every core family: packaged ones and users'.

A schedule is a function that returns phases; the device's machine provides everything else: the tiling fields, the
order of blocks, and the slices, lanes or warps of a phase.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from functools import cache, lru_cache, partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from npusim.config import outside
from npusim.config.family import FAMILIES, MACHINES, NODE_FAMILY, registered, resolved, running
from npusim.config.messages import choices
from npusim.config.packaged import installed
from npusim.config.seen import KeyFunction, pairs_seen
from npusim.config.tiling import Blocks, Tiling, composed, declared_as
from npusim.errors import SpecError, TilingError
from npusim.formats import BLOCK_FORMATS, cast, stored_format
from npusim.identity import Itself
from npusim.kernels.attention.call_blocks import AttentionTensors, attention_cells, attention_tensors
from npusim.kernels.attention.kv_cache import dequantised_inputs
from npusim.kernels.attention.online_softmax import attention_phase
from npusim.kernels.attention.preparation import prepared
from npusim.kernels.attention.score_functions import exponent_factor, scored, sink_of, with_score
from npusim.kernels.attention.tiling_mask import mask_of
from npusim.kernels.declare.registry import Schedule, able_devices, as_family, changed_fields, for_inputs, multiplies
from npusim.kernels.form.lowering import Kernel
from npusim.kernels.form.phase import Phase
from npusim.late_methods import dataclass
from npusim.machines.base import Machine
from npusim.machines.published_kernel import PublishedKernel
from npusim.machines.published_kernels import kernels
from npusim.program.ir.content import kept_by_blocks
from npusim.program.ir.op import Opcode
from npusim.program.ir.tile import GlobalTensor
from npusim.units import chunks

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from npusim.config.device import DeviceSpec
    from npusim.config.family import CoreFamily, Kind
    from npusim.config.problem import AnyProblem, Problem
    from npusim.config.seen import Seen, Sees
    from npusim.kernels.attention.tiling_mask import MaskKind
    from npusim.kernels.declare.registry import Precision
    from npusim.program.ir.tile_program import TileProgram

#: Number of queries that are examined together in the search for a query that sees no key.
LOOKED_AT = 512
ValueType = TypeVar("ValueType")
#: One phase, or a phase together with facts for its machine: those that the tiling fields do not state.
Phases = Sequence["Phase | tuple[Phase, Any]"]
#: ``phases(problem, tiling, precision, machine)``
PhasesFunction = Callable[[Any, Any, Any, Any], Phases]


#: Fields of a precision that operations, products, tensors and earlier kernels read.
_READ_BESIDE = frozenset(
    (
        *("exp_variant", "div_variant", "sum_order", "rounding", "multiply_add", "arithmetic"),
        *("output", "operands", "values", "scale_rule", "smooth"),
    )
)


def machine_class(family: str) -> type[Any]:
    """Return the machine of a core family or a node.

    Raises `SpecError` as `registered`, and if the manifest's machine is not a machine.
    """
    manifest = registered(family)
    kind = resolved(manifest.machine)
    is_machine = isinstance(kind, type) and issubclass(kind, Machine)
    if not is_machine or (kind.build is Machine.build and family != NODE_FAMILY):
        where, what = installed(MACHINES).get(family, family), manifest.machine
        raise SpecError(
            f"{where}: entry point {family!r} of {MACHINES}: {what} is not an npusim.machine.Machine with a build()"
        )
    result: type[Any] = kind
    return result


def machine_of(device: DeviceSpec) -> Any:
    """Return the machine of a device or node: one object, created on the first call for the device."""
    return _machine(Itself(device))


@lru_cache
def _machine(device: Itself) -> Any:
    return machine_class(device.thing.family)(device.thing)


def unread_keys(family: str) -> Mapping[str, str]:
    """Return the keys of device files that have no effect on a core family, each with the option that would read it."""
    return registered(family).unread


def attention_fields(family: str) -> type[Tiling]:
    """Return the tiling fields of attention on a core family."""
    return registered(family).fields_of("attention") or Blocks


def schedule(
    called: str,
    phases: PhasesFunction,
    *,
    precisions: Sequence[Precision] | Mapping[str, Sequence[Precision]],
    tiling: type[Tiling] | Mapping[str, type[Tiling]] | None = Blocks,
    kind: Kind | None = None,
    usual: Mapping[str, object] = MappingProxyType({}),
    families: Sequence[str] = (),
    **more: Any,
) -> tuple[Schedule, ...]:
    """Return a schedule for each core family, ready for ``npusim run FILE.py:NAME``.

    called
        Name of the schedule in results.
    phases
        ``phases(problem, tiling, precision, machine)`` returns the phases in order; tensors with results of the kernel
        have the role ``output``, tensors that one phase writes for another ``workspace``.  The tiling is complete: the
        machine has chosen the open fields.
    precisions
        Presets, frozen dataclasses with ``name`` and ``formats()``; the first is the default.  A mapping by core family
        or kind of processor (``npu``, ``gpu``, ``cpu``) if they differ.  A field that is `AS_FAMILY` has the value of
        the family's manifest.
    tiling
        The kernel's fields, or a mapping as for ``precisions``; the machine uses the fields that it knows.  The fields
        under an empty name are those for core families of installed packages.  None: only the machine's fields.
    kind
        The kind of the kernel, for which a machine adds its fields (`CoreFamily.fields`); None if the kernel has no
        kind.  Without ``families`` the schedule is for all families that run the kind.
    usual
        The kernel's default values of a machine's fields by name, or a `Field` in place of the machine's.
    families
        Core families of the schedule; empty: all, including core families of installed packages.
    more
        Other fields of `Schedule`: ``summary``, ``models`` (features of a workload's attention that the schedule
        computes in addition to plain attention, ``("softcap",)``: no run refuses them), ``problem`` (`Problem`,
        `GemmProblem` or `CopyProblem`) and ``reference(q, k, v, problem, row, tiling)``, which returns the exact
        result, (rows, dv), in float64, from which errors are measured.  q (rows, d) are a head's queries from ``row``
        on, k (keys, d) and v (keys, dv) all of its keys, float64; `attention_scores` returns their scores, scaled and
        masked.  None: softmax(QK^T)V.
    """
    if not isinstance(precisions, Sequence | Mapping):
        raise SpecError(f"schedule {called}: precisions: must be a list, for example [FP32], got {precisions}")
    declared = _Declared(called, precisions, tiling, kind, usual)
    is_open = not families or (isinstance(tiling, Mapping) and "" in tiling)
    same = {"name": called, "build": partial(_build, called, phases), "declared": _declared}
    same |= {"elsewhere": partial(declared.elsewhere, more)} if is_open else {}
    same |= {"summary": "", "origin": _origin(phases), **more}
    listed = families or (running(kind) if kind else tuple(FAMILIES))
    return tuple([Schedule(**{**declared.on(family), **same}) for family in listed])


@dataclass(frozen=True, eq=False)
class _Declared:
    """The meaning of the arguments of :func:`schedule` for a core family."""

    called: str
    precisions: Sequence[Precision] | Mapping[str, Sequence[Precision]]
    own: type[Tiling] | Mapping[str, type[Tiling]] | None
    kind: Kind | None
    usual: Mapping[str, object]

    def on(self, family: str) -> dict[str, Any]:
        """Return the attributes of `Schedule` that depend on the family; fields are imported on first use."""
        listed = self._presets(registered(family))
        fields = cache(partial(self.fields, family))
        return {
            "family": family,
            "tiling": fields,
            "left": partial(_left, fields),
            "precisions": MappingProxyType({p.name: p for p in listed}),
            "default_precision": listed[0].name,
        }

    def elsewhere(self, more: Mapping[str, Any], family: str) -> dict[str, Any] | None:
        """Return the declaration for a family of an installed package, without the stated parts; None if the schedule
        does not run on that family.
        """
        if self.kind and self.kind not in registered(family).fields:
            return None
        return {**self.on(family), **{n: more[n] for n in ("left", "default_precision") if n in more}}

    def fields(self, family: str) -> type[Tiling]:
        """Return the class of the kernel's fields and the machine's.

        Raises `SpecError` for a field of the kernel that is the machine's, and a name in ``usual`` that no machine has.
        """
        manifest = registered(family)
        machine = manifest.fields_of(self.kind) if self.kind else None
        own = self._own_of(manifest) or (None if machine else Blocks)
        if self.kind and (wrong := sorted(self.usual.keys() - (machine or Tiling).model_fields.keys())):
            others = [registered(name).fields_of(self.kind) for name in running(self.kind)]
            known = {n for cls in others if cls for n in cls.model_fields}
            if unknown := [n for n in wrong if n not in known]:
                raise SpecError(
                    f"schedule {self.called}: usual: no machine has the field "
                    f"{unknown[0]!r}{choices(unknown[0], sorted(known))}"
                )
        if own and machine and (twice := sorted(own.model_fields.keys() & machine.model_fields)):
            raise SpecError(
                f"schedule {self.called}: field {twice[0]!r} is already a field of {family}'s machine; set its "
                "default with usual="
            )
        is_own_first = self.kind in ("stages", "chunks")
        return composed(own, machine, self.usual, manifest.processor, is_own_first=is_own_first)

    def _own_of(self, family: CoreFamily) -> type[Tiling] | None:
        usual: type[Tiling] = Blocks
        return self._of(self.own, family, usual) if isinstance(self.own, Mapping) else self.own

    def _presets(self, family: CoreFamily) -> Sequence[Precision]:
        """Return the presets on a family, with its values of fields that are `AS_FAMILY`."""
        given = self.precisions
        listed = self._of(given, family, next(iter(given.values()))) if isinstance(given, Mapping) else given
        if not listed:
            raise SpecError(f"schedule {self.called}: it needs at least one precision")
        return [as_family(p, family) for p in listed]

    @staticmethod
    def _of(given: Mapping[str, ValueType], family: CoreFamily, usual: ValueType) -> ValueType:
        keys = (family.name, family.processor) if family.name in FAMILIES else (family.name, "", family.processor)
        return next((given[key] for key in keys if key in given), usual)


def _left(fields: Callable[[], type[Tiling]], device: DeviceSpec) -> frozenset[str]:
    left: frozenset[str] = machine_of(device).left_alone(fields())
    return left


def _declared(tiling: Tiling, device: DeviceSpec, problem: AnyProblem, precision: Precision) -> Any:
    return machine_of(device).declared(tiling, problem, precision)


def _build(
    called: str, phases: PhasesFunction, problem: Any, tiling: Any, device: DeviceSpec, precision: Any
) -> TileProgram:
    machine, dtype = machine_of(device), getattr(problem, "dtype", "")
    kernel = tiling.published or kernels(PublishedKernel).get(called)
    kernel = kernel if type(getattr(kernel, "decides", None)) is machine.family.decisions else None
    p = precision.whole(dtype) if hasattr(precision, "whole") else for_inputs(precision, dtype, kernel)
    if getattr(p, "multiply_add", None) == "" and (chosen := device.rounding_choices.get("multiply_add")):
        p = replace(p, multiply_add=chosen.value)
    tiling = tiling.whole() if hasattr(tiling, "whole") else tiling
    tiling, notes = machine.fitted(tiling, problem, p)
    if kernel is not None and getattr(precision, "output", "") == "input" and p.output != dtype:
        scaled = f" p_scale={p.p_scale:g}" if hasattr(p, "p_scale") else ""
        notes = (*notes, f"output={p.output}{scaled}: FlashAttention's choice for 8-bit inputs")
    planned = phases(problem, tiling, p, machine)
    if getattr(p, "exp_variant", "").startswith("exp2.") and _origin(phases):
        _refuse_powers_of_two(
            called, p.exp_variant, planned, phases(problem, tiling, replace(p, exp_variant="exp.correct"), machine)
        )
    if getattr(problem, "cache", None) is not None:
        if not machine.has_rows_kernels:
            raise TilingError(
                f"cache: {machine.device.name} has no kernel that converts a cache of {problem.cache} to "
                f"{problem.dtype}; remove cache"
            )
        planned = [*dequantised_inputs(problem, [p[0] if isinstance(p, tuple) else p for p in planned]), *planned]
    tiled_phases, tile_notes = list[tuple[Phase, Any]](), list[tuple[str, str]]()
    for one in planned:
        phase, fields = one if isinstance(one, tuple) else (machine.ordered(one, tiling), None)
        fields, note = (fields, "") if fields else machine.fields_for(called, phase, tiling)
        tiled_phases.append((phase, fields))
        tile_notes += [(phase.name, note)] if note else []
    is_labelled = len({note for _, note in tile_notes}) > 1
    all_notes = [*notes, *(f"{name}: {note}" if is_labelled else note for name, note in tile_notes)]
    all_notes += [n for phase, _ in tiled_phases for n in phase.notes]
    counted = [phase.flops for phase, _ in tiled_phases if phase.flops is not None]
    flops = sum(counted) if counted else problem.flops()
    program: TileProgram = machine.build(called, tiled_phases, flops, tuple(dict.fromkeys(all_notes)))
    return program


def _origin(function: Callable[..., Any]) -> str:
    """Return file and line of a function outside the package, empty for npusim's."""
    return "" if function.__module__.startswith("npusim.") else outside.origin_of(function)


def _refuse_powers_of_two(called: str, variant: str, planned: Phases, natural: Phases) -> None:
    """Raise `SpecError` if powers of two replace powers of e: only the exponential would change, not the factor of
    scores.
    """
    both = [[p[0] if isinstance(p, tuple) else p for p in listed] for listed in (planned, natural)]
    if any(r.opcode is Opcode.EXP for p in both[0] for s in p.stages for r in s.rows) and all(
        a.constants == b.constants and _shape(a) == _shape(b) and a.per_tile == b.per_tile
        for a, b in zip(*both, strict=True)
    ):
        raise SpecError(
            f"schedule {called}: exp_variant={variant} computes 2^x, but the kernel does not multiply its scores "
            "by log2 e; multiply a constant by exponent_factor(precision.exp_variant)"
        )


def _shape(phase: Phase) -> list[tuple[Opcode, str, tuple[str, ...]]]:
    return [(r.opcode, r.dst, r.srcs) for s in phase.stages for r in s.rows]


def attention(
    called: str,
    kernel: Kernel,
    *,
    precisions: Sequence[Precision] | Mapping[str, Sequence[Precision]],
    score: Callable[..., Any] | None = None,
    operands: Mapping[str, Callable[[Any], Any]] = MappingProxyType({}),
    sees: Callable[[Any, Any], Sees] | None = None,
    given: Callable[[Any, Any, Any], Mapping[str, Any]] | None = None,
    fields: type[Tiling] | None = None,
    by_rule: Callable[..., Phases | None] = lambda *_: None,
    tiling: type[Tiling] | Mapping[str, type[Tiling]] | None = None,
    **more: Any,
) -> tuple[Schedule, ...]:
    """Return a schedule of a kernel of q, k, v and mask, for every core family; ``more`` as for :func:`schedule`.

    The kernel receives ``p``, the precision, ``scale``, the factor of scores, and those of the following arguments that
    are among its parameters.

    score
        ``score(s)`` transforms scaled scores before the mask: a soft-cap; it may have ``operands`` as parameters.
    operands
        ``function(problem)`` returns an operand's values, (heads or 1, queries, keys), in the format of scores: a bias.
    sees
        ``sees(problem, tiling)`` returns a function of positions in the sequence, ``function(q, k)``: whether a query
        sees a key, for arrays of both.  Tiles that no query sees are not visited; the reference has the same mask.
        Default: all keys, or the keys up to the query in a causal problem.
    given
        ``given(problem, tiling, p)`` returns further arguments of the kernel, by name.
    fields
        The schedule's own tiling fields, in addition to the machine's.  They belong to the model: no run chooses them,
        and a search varies them only by name; ``Field(..., json_schema_extra=part_of("tile"))`` declares a tile field.
    by_rule
        ``by_rule(problem, tiling, p, machine)`` returns the phases if a kernel splits keys by its own rule.
    """
    _check_names(called, kernel, operands, fields)
    if tiling is None or fields is not None:  # the fields of the machine and of the kernel
        more = {"kind": "attention"} | more
        tiling = None if fields is None else declared_as(fields, "model")
    hooked = None if score is None else with_score(kernel, score, operands)
    own = _Attention(called, kernel, hooked, operands, sees, given, frozenset(more.get("models", ())), by_rule)
    hooks: dict[str, Any] = {"origin": _origin(kernel.function), "takes_lengths": not (sees or operands)}
    hooks["takes_unseen"] = "unseen" in kernel.parameters
    hooks |= {"sees": sees} if sees else {}
    hooks |= {"is_hooked": True} if score else {}
    checked = own.phases if "scale" in kernel.parameters else _without_scale(called, own.phases)
    return schedule(called, checked, precisions=precisions, tiling=tiling, **(hooks | more))


@dataclass(frozen=True, eq=False)
class _Attention:
    """A kernel of attention with its schedule's options, in the arguments of :func:`attention`.

    ``hooked``: the kernel with the schedule's score.  ``models``: the functions of scores that the kernel computes
    itself.
    """

    called: str
    kernel: Kernel
    hooked: Kernel | None
    operands: Mapping[str, Callable[[Any], Any]]
    sees: Callable[[Any, Any], Sees] | None
    given: Callable[[Any, Any, Any], Mapping[str, Any]] | None
    models: frozenset[str]
    by_rule: Callable[[Any, Any, Any, Any], Phases | None]

    def phases(self, problem: Problem, tiling: Any, p: Any, machine: Machine) -> Phases:
        """Return the attention, after the kernels that convert its operands to another format, or the parts into which
        a rule divides it.
        """
        if (ruled := self.by_rule(problem, tiling, p, machine)) is not None:
            return ruled
        # parts that do not depend on any field of the tiling are built once
        memo_tiling = tiling if self.sees or self.given else None
        sizes, masked = (tiling.block_q, tiling.block_kv), (machine.mask_kind(tiling), machine.mask_block(tiling))
        tensors, able = attention_tensors(problem, p.output), machine.has_rows_kernels
        problem, scale = scaled_queries(problem, p)
        before, tensors = read_operands(tensors, p, machine.device, prepares=able, scale=scale)
        return self._checked(p, [*before, self._phase(problem, sizes, p, masked, tensors, memo_tiling)])

    @kept_by_blocks(lambda phase, *_: len(phase.cells))
    def _phase(
        self,
        problem: Problem,
        sizes: tuple[int, int],
        p: Any,
        masked: tuple[MaskKind | None, int],
        tensors: AttentionTensors,
        tiling: Any,
    ) -> Phase:
        kernel, problem, known = self._scored(problem, p)
        if self.given:
            known |= self.given(problem, tiling, p)
        seen = KeyFunction(self.sees(problem, tiling), problem.seq_kv) if self.sees else problem.seen
        # tilings that do not fit are refused before blocks are created
        known["mask"] = mask_of(problem, sizes, masked[0], seen=seen)
        _check_seen(self.called, problem, seen)
        known["cells"] = attention_cells(problem, *sizes, seen=seen, mask_block=masked[1])
        phase = attention_phase(kernel, problem, sizes, p, tensors=tensors, **known)
        if len(phase.loops) > 1:
            walks = f"{self.kernel.__name__} walks tiles in {len(phase.loops)} loops"
            raise TilingError(f"schedule {self.called}: {walks}; attention has one")
        if not self.sees:
            return phase
        pairs = pairs_seen(seen, problem.causal_offset, problem.seq_q)
        return replace(phase, flops=problem.flops_of(problem.batch * pairs))

    def _scored(self, problem: Problem, p: Any) -> tuple[Kernel, Problem, dict[str, Any]]:
        """Return the kernel with all functions of scores, the remaining problem, and the kernel's arguments."""
        kernel = self.hooked
        if kernel:  # hooks receive unscaled scores; the factor log2 e is applied after them
            known: dict[str, Any] = {"scale": problem.scale, "score_factor": exponent_factor(p.exp_variant)}
        else:
            done = self.models.intersection(problem.score_changes)
            problem = problem.model_copy(update={n: type(problem).model_fields[n].default for n in done})
            kernel, known = scored(self.kernel, problem, p, problem.scale)
        bound = _operands(self.called, self.operands, problem, p)
        known |= bound | {"values": known.get("values", {}) | bound["values"]}
        known |= {"unseen": problem.unseen} if "unseen" in self.kernel.parameters else {}
        if "sink" in self.kernel.parameters:
            known["sink"] = sink_of(problem, p, p.softmax)
        elif problem.sink_logits:
            raise TilingError(
                f"sink_logits: schedule {self.called} does not support learned sinks; use --ignore "
                "sink_logits to run without them"
            )
        return kernel, problem, known

    def _checked(self, p: Any, phases: list[Phase]) -> list[Phase]:
        """Return phases; raise `SpecError` for a changed field of the precision that neither they nor other functions
        read.

        If a function computes further arguments (``given``), it may read any field.
        """
        takes = self.kernel.parameters
        read = _READ_BESIDE.union({"exponent"} if "unit" in takes else (), {"sink"} & takes)
        read = read.union({"scale_in"} if "scale" in takes else (), *(q.precision_fields or () for q in phases))
        if not self.given and (wrong := [n for n in changed_fields(p) if n not in read and hasattr(p, n)]):
            listed = ", ".join(f.name for f in fields(p) if f.name in read - {"name"})
            raise SpecError(f"precision field {wrong[0]!r}: schedule {self.called} does not use it; it uses {listed}")
        return phases


def _operands(called: str, operands: Mapping[str, Callable[[Any], Any]], problem: Problem, p: Any) -> dict[str, Any]:
    """Return the tensors of a score's operands by name, and under ``values`` the functions for their numbers."""
    arrays = {n: _operand(called, n, function, problem) for n, function in operands.items()}
    values = {n: partial(_in_format, x, p.softmax, problem.batch) for n, x in arrays.items()}
    sizes = problem.seq_q, problem.seq_kv
    tensors = {n: GlobalTensor(n, problem.batch, len(x), *sizes, p.softmax, "input") for n, x in arrays.items()}
    return {"values": values, **tensors}


def check_multiplied(device: DeviceSpec, fmt: str) -> None:
    """Raise `SpecError` if a device's file states no arithmetic of its matrix unit for a format of few bits."""
    if fmt and stored_format(fmt).bits <= 8 and not multiplies(device, fmt):
        raise SpecError(
            f"{device.name}: its matrix unit does not multiply {fmt} as far as npusim knows; packaged devices that "
            f"do: {able_devices(fmt)}"
        )


def read_operands(
    tensors: AttentionTensors, p: Any, device: DeviceSpec, *, prepares: bool, scale: float | None = None
) -> tuple[list[Phase], AttentionTensors]:
    """Return Q, K and V in the formats in which a precision's products read them, and the kernels that convert them.

    ``prepares``: whether the machine has such kernels; ``scale``: the factor of Q in that kernel.
    """
    fmt, rule, smooth, values = (getattr(p, n, "") for n in ("operands", "scale_rule", "smooth", "values"))
    if rule and fmt not in BLOCK_FORMATS:
        raise SpecError(f"scale_rule={rule}: operands={fmt or tensors.q.fmt} is not a block-scaled format")
    check_multiplied(device, fmt)
    check_multiplied(device, values)
    if not (fmt or smooth or values or scale):
        return [], tensors
    if not prepares:
        named = {"smooth": smooth, "scale_in": scale and "queries", "operands": fmt, "values": values}
        what = next(f"{n}={value}" for n, value in named.items() if value)
        raise TilingError(f"{what}: {device.name} has no kernel that prepares Q, K and V; remove this setting")
    return prepared(tensors, fmt or tensors.k.fmt, scale, rule, smooth, values)


def scaled_queries(problem: Problem, p: Any) -> tuple[Problem, float | None]:
    """Return the problem that the kernel computes, and the factor by which an earlier kernel multiplies Q (None: no
    such kernel).
    """
    if getattr(p, "scale_in", "scores") != "queries":
        return problem, None
    return problem.model_copy(update={"scale": 1.0}), problem.scale


def _check_seen(called: str, problem: Problem, seen: Seen) -> None:
    """Raise `TilingError` for a query for which ``sees`` selects no key: the sum of its row is 0."""
    if not isinstance(seen, KeyFunction) or problem.unseen:
        return
    for row, rows in chunks(problem.seq_q, LOOKED_AT):
        sighted = seen.matrix(problem.causal_offset + row, rows, 0, problem.seq_kv).any(axis=1)
        if not sighted.all():
            query = row + int(np.argmin(sighted))
            raise TilingError(f"schedule {called}: sees: query {query} sees no key; each query must see at least one")


def _operand(called: str, name: str, function: Callable[[Any], Any], problem: Problem) -> NDArray[Any]:
    """Return an operand's values; raise `TilingError` if their shape is not that of scores."""
    values = np.asarray(function(problem))
    if values.shape not in [(heads, problem.seq_q, problem.seq_kv) for heads in (1, problem.heads)]:
        wanted = f"({problem.heads} or 1, {problem.seq_q}, {problem.seq_kv})"
        raise TilingError(
            f"schedule {called}: operand {name} has shape {values.shape}; needed: {wanted} (heads, queries, keys)"
        )
    return values


def _check_names(called: str, kernel: Kernel, operands: Iterable[str], fields: type[Tiling] | None) -> None:
    """Raise `SpecError` for operands and fields whose names are already in use."""
    functions = Kernel.phase, attention_phase
    used = {*kernel.axes, *kernel.results, *kernel.parameters, "q", "k", "v", "o", "mask", "scale", "score_factor"}
    used |= {n for function in functions for n in inspect.signature(function).parameters}
    if wrong := sorted(used.intersection(operands)):
        raise SpecError(f"schedule {called}: operand {wrong[0]!r} has a name that the kernel uses; choose another name")
    if fields is None:
        return
    known = {n for family in FAMILIES for n in attention_fields(family).model_fields}
    if wrong := sorted(known.intersection(fields.model_fields)):
        raise SpecError(f"schedule {called}: field {wrong[0]!r} is a field of a machine; choose another name")


def _without_scale(called: str, phases: PhasesFunction) -> PhasesFunction:
    def checked(problem: Problem, tiling: Any, p: Any, machine: Machine) -> Phases:
        if p.exp_variant.startswith("exp2."):
            raise SpecError(
                f"schedule {called}: exp_variant={p.exp_variant} computes 2^x, but its kernel has no parameter for "
                "the scale, which includes log2 e"
            )
        return phases(problem, tiling, p, machine)

    return checked


def _in_format(values: NDArray[Any], fmt: str, batch: int) -> NDArray[Any]:
    return np.broadcast_to(cast(values, fmt), (batch, *values.shape))
