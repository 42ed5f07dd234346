"""Variants of a request: named changes, the plans that result, and keys that show which plans have the same program or
equal bits.

Searches, invariance and comparisons with a kernel's output all change a request by name and build it.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import field, replace
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any, cast

from npusim.config.tiling import Tiling
from npusim.formats import get_format
from npusim.late_methods import dataclass
from npusim.program.ir.content import kept_by_blocks
from npusim.program.ir.op import Opcode
from npusim.program.ir.opaque import Lanes, at_lane, twin
from npusim.program.ir.tile import GlobalTile
from npusim.program.ir.tile_program import Loop
from npusim.program.numerics.evaluate import needed_blocks
from npusim.simulation.chosen_tile import candidates, open_fields, program_of
from npusim.simulation.plan import plan_of
from npusim.simulation.simulate import BuiltPlan
from npusim.units import format_value

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence

    from npusim.program.ir.op import Attributes, Source, Step
    from npusim.program.ir.tile_program import Item, ProgramPhase, TileProgram
    from npusim.program.numerics.paths import Place
    from npusim.simulation.plan import Plan
    from npusim.simulation.request import Request


#: The name of a change to another preset of the precision.
PRECISION = "precision"
#: Changes to options of a run other than its tiling and precision.
OPTIONS = ("schedule", "workload", "hw", "seq", "seq_q", "seq_kv", "batch", "tensor_parallel", "causal", "dtype")


def _nothing() -> Any:
    return field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Named changes to a request.

    ``options`` of a run, fields of its ``problem``, numbers of its device (``overrides``), fields of its ``tiling`` and
    ``precision``; the key `PRECISION` of ``precision`` selects a preset.
    """

    options: Mapping[str, Any] = _nothing()
    problem: Mapping[str, Any] = _nothing()
    overrides: Mapping[str, str] = _nothing()
    tiling: Mapping[str, object] = _nothing()
    precision: Mapping[str, object] = _nothing()

    def on(self, request: Request) -> Request:
        """Return the request with these changes, without bits and timeline."""
        rest = [part for part in (request.precision or "").split(",") if part.partition("=")[0] not in self.precision]
        changed = [str(v) if k == PRECISION else f"{k}={format_value(v)}" for k, v in self.precision.items()]
        return replace(
            request,
            **self.options,
            problem=request.problem and request.problem.model_copy(update=dict(self.problem)),
            overrides={**(request.overrides or {}), **self.overrides} or None,
            tiling={**named_fields(request.tiling), **self.tiling},
            precision=",".join(filter(None, (*rest, *changed))) or None,
            numerics=False,
            trace_groups=(),
            presets=False,
        )


def named_fields(tiling: Mapping[str, object] | Tiling | None) -> dict[str, object]:
    """Return the fields of a tiling that were named."""
    return tiling.model_dump(exclude_unset=True) if isinstance(tiling, Tiling) else dict(tiling or {})


class Variants:
    """Builds variants of one request.

    Variants with the same problem and device share these objects, so that their programs can share the results that
    depend on them. ``is_open``: fields that neither the request nor a variant names are chosen as in a run of the
    variant; otherwise they have their declared values.
    """

    def __init__(self, request: Request, device_keys: Collection[str] = (), *, is_open: bool = False) -> None:
        self.request, self.device_keys = request, device_keys
        self.is_open = is_open and not isinstance(request.tiling, Tiling)
        self._scene = lru_cache(maxsize=32)(self._read)
        #: The program of changes by name, given as a tuple.  Programs share blocks, so a program counts as 64 blocks
        #: plus a sixteenth of its own towards the limit of what is stored.
        count = kept_by_blocks(lambda built, _: 64 + sum(len(phase.blocks) for phase in built.program.phases) // 16)
        self.built = count(lambda changes: self.build(self.named(dict(changes)), is_hinted=False))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle its arguments without the request's ``progress``."""
        return partial(Variants, is_open=self.is_open), (replace(self.request, progress=None), self.device_keys)

    def named(self, changes: Mapping[str, object]) -> Variant:
        """Return the variant for changes that have only a name: a name in `OPTIONS` or in ``device_keys``, else a field
        of the tiling or precision.

        A change to None has no effect.
        """
        values: dict[str, Any] = {k: v for k, v in changes.items() if v is not None}
        options = {k: values.pop(k) for k in OPTIONS if k in values}
        if "causal" in options:
            options["causal"] = str(options["causal"]).lower() == "true"
        overrides = {k: format_value(values.pop(k)) for k in self.device_keys if k in values}
        scene = self._scene(tuple(options.items()), (), tuple(overrides.items()))
        tiling = {k: values.pop(k) for k in list(values) if k in scene.tiling_fields}
        return Variant(options=options, overrides=overrides, tiling=tiling, precision=values)

    def request_of(self, changes: Mapping[str, object]) -> Request:
        """Return the request with changes that are given only by name, as in :meth:`named`."""
        return self.named(changes).on(self.request)

    def build(self, variant: Variant, *, is_hinted: bool = True) -> BuiltPlan:
        """Return a variant's program; raise `TilingError` where it does not fit, with an alternative if
        ``is_hinted``.
        """
        return BuiltPlan(*program_of(self._plan(variant), is_hinted=is_hinted))

    def candidates(
        self, changes: Mapping[str, object], heavier: Sequence[Mapping[str, Any]] | None = None
    ) -> Iterator[BuiltPlan]:
        """Yield the candidate programs for changes that are given only by name; ``built`` returns one of them. See
        `tile.candidates`.

        Raises `TilingError` if none fits.
        """
        variant = self.named(changes)
        named = {**named_fields(self.request.tiling), **variant.tiling}
        if not (self.is_open and (heavier or self._scene_of(variant).open_fields - named.keys())):
            yield self.built(tuple(changes.items()))
        else:
            yield from (BuiltPlan(*both) for both in candidates(self._plan(variant), heavier))

    def chosen(self, changes: Mapping[str, object]) -> dict[str, object]:
        """Return the fields that were chosen for a variant, whose changes are given only by name."""
        tiling = self.built(tuple(changes.items())).plan.tiling
        declared = {n: f.default for n, f in type(tiling).model_fields.items()}
        named = {**named_fields(self.request.tiling), **changes}
        return {n: v for n, v in tiling if n not in named and v != declared[n]}

    def _plan(self, variant: Variant) -> Plan:
        """Return a variant's plan; the rule chooses the fields that it does not name."""
        plan = self._scene_of(variant).plan
        request = replace(variant, options={}, problem={}, overrides={}).on(self.request)
        tiling = plan.schedule.tiled(request.chosen_tiling(plan.schedule.tiling))
        plan = replace(plan, precision=plan.schedule.precision(request.changed_precision()))
        if plan.is_open:
            tiling = plan.schedule.declared(tiling, plan.device, plan.problem, plan.precision)
        return replace(plan, tiling=tiling, is_open=self.is_open and plan.is_open)

    def _scene_of(self, variant: Variant) -> _Scene:
        scenery = (variant.options, variant.problem, variant.overrides)
        return self._scene(*(tuple(changes.items()) for changes in scenery))

    def _read(self, *changes: tuple[tuple[str, Any], ...]) -> _Scene:
        options, problem, overrides = map(dict, changes)
        request = Variant(options=options, problem=problem, overrides=overrides).on(self.request)
        load = request.load() if request.problem is None and request.workload is not None else None
        return _Scene(replace(request, hw=request.machine(), overrides=None, workload=load))


class _Scene:
    """The request, its files read, and the plan that variants of other tilings and precisions share."""

    def __init__(self, request: Request) -> None:
        self.request = replace(request, tiling=None, precision=None)

    @cached_property
    def tiling_fields(self) -> Collection[str]:
        return self.request.find_schedule().tiling.model_fields.keys()

    @cached_property
    def open_fields(self) -> frozenset[str]:
        return open_fields(self.plan.schedule, self.plan.device) if self.plan.is_open else frozenset()

    @cached_property
    def plan(self) -> Plan:
        return replace(plan_of(self.request, is_bare=True), tensors=None)


# ---------------------------------------------------------------- keys of programs


def bits_key(built: BuiltPlan) -> str:
    """Return the digest that variants with equal bits share; empty if the machine does not define a digest."""
    contents = [repr(built.plan.problem)]
    for phase in built.program.phases:
        if phase.bits is None:
            return ""
        content, blocks, sums = cast("Any", phase.bits())
        contents += [repr(content), *sorted(map(repr, blocks)), repr(sums)]
    # A function of a module is identified by its name; an object whose text contains its address cannot be identified
    # by its content.
    text = re.sub(r"<function ([\w.]+) at 0x[0-9a-f]+>", r"\1", "\n".join(contents))
    return "" if " at 0x" in text else hashlib.sha256(text.encode()).hexdigest()[:16]


def row_key(program: TileProgram, place: Place, *, has_rows: bool = False) -> Hashable:
    """Return a key of a row of the output: programs with the same key compute the same bits for this row on all inputs.

    The key contains the steps on the row, phase by phase and block by block: the operations of each label in their
    order, with their columns and depths; no operation combines rows.  Addresses, queues and the number of rows of an
    operation are not part of it, because they change no bit.  ``has_rows``: rows of Q and of intermediate tensors are
    part of the key, for a kernel that walks them; in attention they are rows of the output.
    """
    return tuple(row_steps(program, place, has_rows=has_rows))


def row_steps(program: TileProgram, place: Place, *, has_rows: bool = False) -> Iterator[Hashable]:
    """Yield `row_key` block by block, so that two keys with an early difference need not be computed completely."""
    how = program.tensors["o"].batch, has_rows
    needed = needed_blocks(program, [place.row], {place.head}, batches={place.batch})
    for phase in program.phases:
        blocks, same, keys = needed[phase.name], defaultdict[Any, list[int]](list), dict[int, Any]()
        shapes = [phase.shape(block) for block in blocks]
        for number, shape in enumerate(shapes):
            same[shape].append(number)
        for number, shape in enumerate(shapes):
            if number not in keys:
                # The first block is examined separately, because keys that differ mostly differ in it.
                alike = [n for n in same[shape] if n] if number else [0]
                keys.update(zip(alike, _keys_of_blocks(phase, [blocks[n] for n in alike], how), strict=True))
            yield keys.pop(number)


def _keys_of_blocks(phase: ProgramPhase, blocks: Sequence[Any], how: tuple[int, bool]) -> list[Hashable]:
    """Return the keys of blocks of one shape; all have the same key if the body does not compare their positions."""
    each: list[dict[str, list[Hashable]]] = [defaultdict(list) for _ in blocks]
    try:
        _collect(phase.body(twin(blocks, "block", lambda _name, values: Lanes(values))), how, each)
    except TypeError:
        each = [defaultdict(list) for _ in blocks]
        for block, steps in zip(blocks, each, strict=True):
            _collect(phase.body(block), how, [steps])
    return [tuple(sorted((label, tuple(operations)) for label, operations in steps.items())) for steps in each]


def _collect(items: Iterable[Item], how: tuple[int, bool], each: Sequence[dict[str, list[Hashable]]]) -> None:
    """Collect operations by label and block; operations that differ only in their rows (slices, bands, cores) are
    collected once per body.
    """
    seen: list[set[Hashable]] = [set() for _ in each]
    for item in items:
        if isinstance(item, Loop):
            for index in item.indices:
                _collect(item.body(index), how, each)
        elif item.steps:
            several = len(each) if any(map(_has_lanes, item.steps)) else 1
            keys = [(item.label, tuple(_step(step, how, n) for step in item.steps)) for n in range(several)]
            for key, into, done in zip(keys if several > 1 else keys * len(each), each, seen, strict=True):
                if key not in done:
                    done.add(key)
                    into[item.label].append(key[1])


def _has_lanes(step: Step) -> bool:
    operands: Iterable[Any] = (
        at for x in (step.dst, *step.srcs) for at in (x.corner if isinstance(x, GlobalTile) else (x,))
    )
    return any(type(at) is Lanes for at in operands)


def _step(step: Step, how: tuple[int, bool], lane: int) -> Hashable:
    whole = (step.attributes.transpose_a, True) if step.opcode is Opcode.MATMUL else (False,) * len(step.srcs)
    sources = tuple(_operand(s, *how, lane, is_whole=x) for s, x in zip(step.srcs, whole, strict=True))
    return step.opcode.value, step.name, _in_words(step.attributes), _operand(step.dst, *how, lane), sources


@lru_cache(maxsize=256)
def _in_words(attributes: Attributes) -> str:
    """Return attributes without the layout of tiles in a warp, which affects no bit."""
    return str(replace(attributes, warp=None))


def _operand(source: Source, sequences: int, has_rows: bool, lane: int, *, is_whole: bool = False) -> Hashable:
    """Return the parts of an operand that decide a row's bits: columns, and the complete contracted operand of a
    product.

    ``has_rows``: as for `row_key`; ``lane``: the number of the block, where coordinates are `Lanes`.
    """
    if isinstance(source, float | int):
        return float(at_lane(source, lane)).hex()
    if isinstance(source, GlobalTile):
        tensor = source.tensor
        batch, _, row, col = (at_lane(at, lane) for at in source.corner)
        part = batch % max(1, tensor.batch // sequences)  # the index among the partial results of a sequence
        has_rows = has_rows or not (tensor.name == "q" or tensor.role in ("output", "workspace"))
        rows = (row, source.rows) if has_rows else (-1, -1)
        return tensor.name, tensor.fmt, part, *rows, col, source.cols
    at = source.offset_bytes // get_format(source.fmt).size_bytes if hasattr(source, "ring") else 0
    if is_whole:
        return source.fmt, source.rows, source.cols, source.stride, at
    return source.fmt, source.cols, at % source.stride
