"""The program of a plan. Tiling fields that the user does not name are chosen by the predicted times of a few tiles
that a machine offers.

The first candidate is the schedule's declared tile, which is the tile of the published kernel.  The machine then offers
settings of its fields, group after group (`Machine.settings`); each is simulated without bits, and is used if it makes
the call at least `WORTH` faster.  A kernel of plain tensors has no such list: the search goes along the values that its
fields declare, field after field, as long as the call becomes faster (`_in_steps`).  Named fields do not change.  Tiles
of a long attention are compared on a shorter attention (`judged_problem`); then the fastest tiles, the declared tile
and, if numbers of the device were changed, the choice for the unchanged device are compared on the call itself, or on a
part of it (`final_problem`).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import field, replace
from functools import lru_cache
from importlib.util import find_spec
from math import inf
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from npusim import cache
from npusim.config import outside
from npusim.config.family import module_of
from npusim.config.tiling import BEST, SEARCHED, build_tiling, declared, tile_fields, tiling_fields, word_of
from npusim.errors import NpusimError, SpecError, TilingError, one_line
from npusim.identity import Itself
from npusim.kernels.declare.define import machine_class, machine_of
from npusim.kernels.declare.registry import open_sizes
from npusim.kernels.triton import is_launch
from npusim.late_methods import dataclass
from npusim.program.ir.check import check
from npusim.program.ir.content import uncollected
from npusim.program.ir.sameness import ProgramContent
from npusim.program.timing import method_named
from npusim.program.timing.stream import Streams
from npusim.simulation.classes import class_key
from npusim.simulation.ranking import Prediction, predicted, ranked, steady
from npusim.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from npusim.config.device import DeviceSpec, L2State
    from npusim.config.problem import AnyProblem
    from npusim.config.tiling import Tiling
    from npusim.kernels.declare.registry import Precision
    from npusim.library import Schedule
    from npusim.program.ir.tile_program import TileProgram
    from npusim.simulation.plan import Plan


#: Smallest gain, as a share of a call's time, with which a choice replaces the declared tile and its bits.
WORTH = 0.01
#: Number of characters of a class of bits that a run shows.
SHOWN = 8
#: Largest number of (query, key) pairs for which tiles are compared on the complete call (8 causal heads of 4,096
#: tokens); smallest number of tokens to which a call is shortened.
PAIRS, SHORTEST = 8 * 4096 * 4097 // 2, 2048
#: Largest numbers of pairs for which tiles are compared again on the complete call: if a mask makes blocks differ; and
#: if all blocks are equal, so that only a few are simulated.
FINAL_PAIRS, FINAL_PAIRS_ALIKE = 16 * PAIRS, 256 * PAIRS
#: Number of tiles that are simulated for a call whose tile is chosen step by step.
MOST_TRIED = 24
#: A call with fewer KV heads than this is shortened without removing heads.
HEADS = 8


class TileChoice(NamedTuple):
    """Fields that were chosen for a call because it does not name them, and the note about them, which is empty if
    there was no field to choose.
    """

    fields: Mapping[str, object] = MappingProxyType({})
    note: str = ""


class _Tried(NamedTuple):
    """A simulated tile: the time of the call, launches included, and the fields of the tile."""

    seconds: float
    fields: Mapping[str, object]


def program_of(plan: Plan, *, is_hinted: bool = True) -> tuple[Plan, TileProgram]:
    """Return a plan with a chosen tiling that fits, and its program, with the requested content of L2.

    Raises `TilingError` if no tiling fits, with an alternative if ``is_hinted``.
    """
    plan = _with_best(plan)
    choice = choose_tile(plan)
    tiling = plan.tiling.model_copy(update=choice.fields)
    tiling, program = plan.schedule.fitted(plan.problem, tiling, plan.device, plan.precision, is_hinted=is_hinted)
    if choice.note:
        key = class_key(program, plan.device)
        note = f"{choice.note}; bits of class {key[:SHOWN]}" if key else choice.note
        program = replace(program, notes=(*program.notes, note))
    program = starting_with(program, plan.device, plan.request.l2)
    return replace(plan, tiling=tiling), program


def _with_best(plan: Plan) -> Plan:
    """Return a plan in which each field whose value is `BEST` has a number: the first value that a search would try.

    Raises `TilingError` if no tiling has a time.
    """
    for name, info in type(plan.tiling).model_fields.items():
        extra: Any = info.json_schema_extra
        if getattr(plan.tiling, name) is not None or word_of(type(plan.tiling), name, None) != BEST:
            continue
        made = [_predicted(plan, {name: value}) for value in extra[SEARCHED]]
        if not (order := ranked([prediction for _, prediction in made])):
            raise TilingError(f"{name}={BEST}: no value has a time: {made[0][1].reason}")
        plan = made[order[0]][0]
    return plan


def _predicted(plan: Plan, fields: Mapping[str, object]) -> tuple[Plan, Prediction]:
    """Return a plan with other fields, and the prediction of its program that ``tune`` would compare."""
    device, request = plan.device, plan.request
    try:
        if not device.is_timed:
            raise SpecError(f"{device.name} has no timing model: nothing to compare")
        tiling = plan.tiling.model_copy(update=dict(fields))
        plan = replace(plan, tiling=plan.schedule.declared(tiling, device, plan.problem, plan.precision))
        compared = replace(plan, request=replace(request, l2=steady(request.l2, device)))
        _, program = program_of(compared, is_hinted=False)
        timing = method_named(request.method)(program, device, trace_groups=(), streams=Streams(program, device))
    except NpusimError as error:
        return plan, Prediction(reason=one_line(error))
    return plan, predicted(program, device, timing)


def candidates(plan: Plan, heavier: Sequence[Mapping[str, Any]] | None = None) -> Iterator[tuple[Plan, TileProgram]]:
    """Yield the possible results of `program_of` for a plan: each tile that fits and that the rule may choose.

    With ``heavier``, the plan represents a family of plans: the lightest value of a named field represents all values
    of the field, and a setting may agree with any of them. With the other values in ``heavier`` (the heaviest first),
    sizes may shrink further. Raises `TilingError` if no tile fits.
    """
    standing = {f.name for f in tiling_fields(type(plan.tiling)) if f.lightest and heavier is not None}
    known: set[Tiling] = set()
    # In a what-if, the choice for the unchanged device is compared too.
    for device in filter(None, (plan.device, plan.device.unchanged)):
        on = replace(plan, device=device)
        reached: list[dict[str, object]] = [{}]
        groups: list[list[dict[str, object]]] = [[{}]]
        if _may_choose(on) and is_chosen_in_steps(on.schedule):
            yield program_of(plan, is_hinted=False)
            return
        if _may_choose(on):
            groups += _groups(device, on.problem, on.tiling, on.tiling.model_fields_set, standing)
        for group in groups:
            for fields in [{**before, **setting} for before in reached for setting in group]:
                # A setting may have the values of a tile that already fits.
                same = _fixed(plan, fields) if known and device is plan.device else None
                if same is not None and same in known:
                    changed = _changed(same, plan.tiling)
                    reached += [changed] if changed not in reached else []
                    continue
                for changed, built in _fitted(on, plan.tiling, fields, heavier or ()):
                    reached += [changed] if fields and changed not in reached else []
                    try:
                        result, program = built if built and device is plan.device else _named(plan, changed)
                    except NpusimError:  # the rule does not choose it
                        continue
                    if result.tiling not in known:
                        known.add(result.tiling)
                        yield result, program
    if not known:
        yield _named(plan, {})


def _fitted(
    plan: Plan, declared: Tiling, fields: Mapping[str, object], heavier: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[dict[str, object], tuple[Plan, TileProgram] | None]]:
    """Yield the tiles with ``fields`` that fit, each once, as differences from the declared tile; the first has its
    program.

    ``heavier``: see `candidates`; a tile whose sizes do not shrink with the heaviest values does not shrink with others
    either, and is then not built with them.
    """
    listed: list[dict[str, object]] = []

    def changes(tiling: Tiling) -> dict[str, object]:
        return {n: v for n, v in _changed(tiling, declared).items() if n not in named}

    for number, named in enumerate(({}, *heavier)):
        if number == 1 and (fixed := _fixed(plan, {**fields, **named})) and changes(fixed) in listed:
            return
        try:
            built = _named(plan, {**fields, **named})
        except NpusimError:  # and heavier values do not shorten it
            if not number:
                return
            continue
        changed = changes(built[0].tiling)
        if changed not in listed:
            listed.append(changed)
            yield changed, None if number else built
        elif number == 1:
            return


def _named(plan: Plan, fields: Mapping[str, object]) -> tuple[Plan, TileProgram]:
    """Return `program_of` for a plan in which the fields count as named, so that no field is left to choose."""
    return program_of(replace(plan, tiling=_with(plan.tiling, fields), is_open=False), is_hinted=False)


def _fixed(plan: Plan, fields: Mapping[str, object]) -> Tiling | None:
    """Return the tile of `_named` if it fits, without its program.

    None if its sizes may shrink, or if a field is refused.
    """
    try:
        tiling = _with(plan.tiling, fields)
        if open_sizes(tiling) or _with_best(replace(plan, tiling=tiling)).tiling is not tiling:
            return None
        return plan.schedule.declared(tiling, plan.device, plan.problem, plan.precision)
    except NpusimError:
        return None


def _with(tiling: Tiling, fields: Mapping[str, object]) -> Tiling:
    """Return a tiling with other fields, which count as named; raise `TilingError` for values outside their limits."""
    result = build_tiling(type(tiling), {**tiling.model_dump(exclude_unset=True), **fields})
    return tiling.model_copy(update={n: getattr(result, n) for n in fields})


def _changed(tiling: Tiling, declared: Tiling) -> dict[str, object]:
    return {n: v for n, v in tiling if v != getattr(declared, n)}


def starting_with(program: TileProgram, device: DeviceSpec, l2: L2State | None) -> TileProgram:
    """Return the program with this content of L2 at its start, or with the content that the device file states.

    Raises `SpecError` if the inputs should be in L2 but do not fit, or if the device file does not state the number of
    dirty lines.
    """
    starts = device.memory.l2.starts
    l2 = l2 or (starts.value if starts else "clean")
    if l2 == "dirty":
        device.memory.l2.dirty_bytes()
    size = sum(t.size_bytes for t in program.tensors.values() if t.role == "input")
    capacity = device.memory.l2.capacity_bytes.value
    if l2 == "warm" and size > capacity:
        raise SpecError(
            f"l2: warm: inputs of {format_bytes(size)} do not stay in the L2 of {device.name}, {format_bytes(capacity)}"
        )
    return replace(program, l2=l2)


# ---------------------------------------------------------------- choice of the tile


def choose_tile(plan: Plan) -> TileChoice:
    """Return the chosen fields among those that are not named, by one rule for all callers that build a plan.

    No field is chosen on a device without times.  Neither is one chosen for a library's products, copies and rows,
    because the library chooses their fields.
    """
    if not _may_choose(plan):
        return TileChoice()
    named, precision = plan.tiling.model_fields_set, cast("Any", plan.precision)
    of_call = plan.problem, precision, plan.tiling, frozenset(named), plan.request.l2
    schedule, unchanged, usual = Itself(plan.schedule), plan.device.unchanged, None
    with uncollected():
        if unchanged is not None and unchanged.is_timed:
            usual = tuple(_choice(schedule, _one_device(Itself(unchanged)), *of_call).fields.items())
        return _choice(schedule, _one_device(Itself(plan.device)), *of_call, usual)


def fields_of_run(plan: Plan, tiling: Tiling) -> dict[str, object]:
    """Return the fields of a run's ``tiling`` that define its tile: the fields that its ``plan`` names, and the chosen
    fields.

    A request that names these fields has this tile even if its other options change; only sizes that the request does
    not name may shrink to fit.
    """
    names = plan.tiling.model_fields_set | choose_tile(plan).fields.keys()
    return {n: value for n, value in tiling if n in names}


def _may_choose(plan: Plan) -> bool:
    features = plan.schedule.problem.features
    return plan.is_open and bool(features) and not plan.schedule.is_stated and plan.device.is_timed


def is_chosen_in_steps(schedule: Schedule) -> bool:
    """Return whether a schedule's tile is chosen step by step: for kernels of plain tensors no machine lists tiles."""
    return "plain" in schedule.problem.features and not schedule.is_stated


def _axes(
    schedule: Schedule, device: DeviceSpec, tiling: Tiling, named: Collection[str]
) -> dict[str, tuple[object, ...]]:
    """Return the declared values of the tile's fields that are not named, except fields that no search changes."""
    left = {*schedule.left(device), *machine_of(device).decided(tiling), *named}
    return {n: values for n, values in declared(type(tiling)).items() if n not in left}


def _groups(
    device: DeviceSpec, problem: AnyProblem, tiling: Tiling, named: Collection[str], standing: Collection[str] = ()
) -> list[list[dict[str, object]]]:
    """Return the settings that the rule tries, group by group; see `_open`."""
    return [list(_open(group, tiling, named, standing)) for group in machine_of(device).settings(tiling, problem)]


def open_fields(schedule: Schedule, device: DeviceSpec) -> frozenset[str]:
    """Return the tiling fields that the rule may choose where they are not named."""
    if is_chosen_in_steps(schedule) and device.is_timed:
        return frozenset(_axes(schedule, device, build_tiling(schedule.tiling, {}), ()))
    return listed_fields(schedule, device)


def listed_fields(schedule: Schedule, device: DeviceSpec) -> frozenset[str]:
    """Return the tiling fields whose settings the machine lists; only attention has such fields."""
    if "attention" not in schedule.problem.features or not device.is_timed:
        return frozenset()
    settings = machine_of(device).settings(build_tiling(schedule.tiling, {}), None)
    return frozenset(n for group in settings for s in group for n in s) & tile_fields(schedule.tiling)


@lru_cache(maxsize=64)
def _one_device(device: Itself) -> Itself:
    """Return the same object for all devices with equal content, because each run creates a new device for changed
    numbers.
    """
    return _of_content(_content_of(device)).setdefault("first", device)


@lru_cache(maxsize=64)
def _content_of(device: Itself) -> bytes:
    """Return the digest of a device's content."""
    return cache.digest(device.thing.model_dump_json())


@lru_cache(maxsize=64)
def _of_content(_content: bytes) -> dict[str, Itself]:
    return {}


@lru_cache(maxsize=256)
def _choice(
    schedule: Itself,
    device: Itself,
    problem: AnyProblem,
    precision: Any,
    tiling: Tiling,
    named: frozenset[str],
    l2: L2State | None,
    usual: tuple[tuple[str, object], ...] | None = None,
) -> TileChoice:
    """Return the choice for a call, computed once; ``named`` distinguishes equal tilings with different named fields.

    ``usual``: the chosen fields on the device before its numbers were changed; None: no number was changed.
    """
    call = problem, precision, tiling, sorted(tiling.model_fields_set), sorted(named), l2, usual

    def made() -> list[object]:
        trial = _Trial(schedule.thing, device.thing, problem, judged_problem(problem), precision, tiling, l2)
        if axes:
            fields, note = _in_steps(trial, axes, dict(usual or ()))
        else:
            fields, note = _tried_out(trial, groups, dict(usual or ()))
        return [dict(fields), note]

    is_stepped = is_chosen_in_steps(schedule.thing)
    axes = _axes(schedule.thing, device.thing, tiling, named) if is_stepped else {}
    groups = [] if is_stepped else _groups(device.thing, problem, tiling, named)
    if not (axes or any(groups)):
        return TileChoice()
    return TileChoice(*remembered("tile", schedule.thing, device.thing, call, made))


def remembered(
    kind: str, schedule: Schedule, device: DeviceSpec, call: tuple[object, ...], make: Callable[[], Any]
) -> Any:
    """Return the JSON value of ``make`` for a call; a stored result comes from the cache folder.

    A stored result is valid until npusim's files change, or the outside files on which it depends: a schedule of
    attention, a kernel, a machine, and all files that Python loaded for them.  A process that loaded npusim's files
    before they changed stores no result.  A call with an object whose text contains an address cannot be identified by
    its content: its result is not stored.
    """
    files, words = _outside_files(schedule, device, call), [*map(repr, call)]
    if any(" at 0x" in word for word in words) or (
        files and (is_launch(schedule.name) or outside.sources(files) is None)
    ):
        return make()
    can_compile = _has_compiler(), os.environ.get("NUMBA_DISABLE_JIT")
    content = schedule.name, files, _content_of(Itself(device)), *words
    stamp = cache.digest(cache.package_digest(), can_compile, *content)
    name = f"{stamp.hex()[:3]}.{kind}"  # at most 4096 files: a later value replaces an earlier one
    if (kept := cache.load(name, stamp)) is not None:
        value, of_files = json.loads(kept)
        if all(outside.digest_of(file) == digest for file, digest in of_files.items()):
            return value
    value = make()
    digests = outside.sources(files) if files else {}  # some may be loaded by now
    text = json.dumps([value, digests], default=repr)
    if digests is not None and json.loads(text)[0] == value and cache.is_loaded_code():
        cache.store(name, stamp, text.encode(), is_silent=True)
    return value


def _outside_files(schedule: Schedule, device: DeviceSpec, call: tuple[object, ...]) -> list[str]:
    """Return the outside files of a call: its schedule, its kernel, its machine and the machine's manifest."""
    kernels = [one.get("kernel") if isinstance(one, Mapping) else getattr(one, "kernel", None) for one in call]
    modules = [outside.load(k, "a kernel")[0] for k in kernels if isinstance(k, str) and outside.is_outside(k)]
    machine = {machine_class(device.family).__module__, module_of(device.family)}
    modules += [sys.modules[name] for name in machine if not name.startswith("npusim.")]
    files = [schedule.origin.rpartition(":")[0]] if schedule.origin else []
    return sorted({*files, *(str(module.__file__) for module in modules)})


@lru_cache(maxsize=1)
def _has_compiler() -> bool:
    try:
        return find_spec("llvmlite") is not None
    except ImportError:  # an import finder refuses it
        return False


def _tried_out(trial: _Trial, groups: Iterable[Iterable[dict[str, object]]], usual: Mapping[str, object]) -> TileChoice:
    """Return the choice among settings, group after group; it is not slower than the fields ``usual``."""
    declared = trial.tried({})
    best = declared or _Tried(inf, {})
    for group in groups:
        for fields in [{**best.fields, **setting} for setting in group]:
            best = trial.better(best, fields, by=WORTH)
    last, tries = final_problem(trial.called), trial.count_in_words()
    final = trial if last == trial.problem else replace(trial, problem=last)
    if final is not trial or usual:
        listed, declared = [best, *trial.fastest()], final.tried({})
        best = declared or _Tried(inf, {})
        for tried in listed:
            best = final.better(best, tried.fields, by=WORTH)
        best = final.better(best, usual) if usual else best
        tries += f"; {final.count_in_words(is_last=True)}" if final is not trial else ""
    chosen = {n for group in groups for setting in group for n in setting} | best.fields.keys()
    return _as_choice(trial, declared, best, chosen, tries)


def _as_choice(trial: _Trial, declared: _Tried | None, best: _Tried, chosen: Collection[str], tries: str) -> TileChoice:
    """Return the choice of the best tile, whose note has the values of all ``chosen`` fields."""
    tiling = trial.tiling
    if best is declared or not best.fields:
        return TileChoice(note=f"tile=auto: the declared tile, {tries}")
    # all fields, so that a request that names them has this tile again
    values = {n: best.fields.get(n, v) for n, v in tiling if n in chosen}
    named = {n: word_of(type(tiling), n, v) for n, v in values.items()}
    words = " ".join(f"{n}={v}" for n, v in named.items() if v is not None)
    if refusal := trial.refusal(best.fields):
        return TileChoice(note=f"tile=auto: the declared tile; {words} is refused: {refusal}")
    gain = f"{(1 - best.seconds / declared.seconds) * 100:.1f} % faster than the declared tile" if declared else ""
    return TileChoice(best.fields, f"tile=auto: {words}, {gain or 'which fits'}, {tries}")


def _in_steps(trial: _Trial, axes: Mapping[str, tuple[object, ...]], usual: Mapping[str, object]) -> TileChoice:
    """Return the choice among tiles that differ from the declared one by steps along the axes of fields.

    Along an axis the walk continues in both directions while the call becomes faster or does not change: a size above a
    tensor's has no effect.  The axes are walked until no axis gains `WORTH`, or until `MOST_TRIED` tiles were
    simulated.
    """
    declared = trial.tried({})
    best = declared or _Tried(inf, {})
    before = None
    while best is not before and trial.count() < MOST_TRIED:
        before = best
        for name, values in axes.items():
            for walk in _walks(values, best.fields.get(name, getattr(trial.tiling, name))):
                best = _walked(trial, best, name, walk)
    best = trial.better(best, usual) if usual else best
    return _as_choice(trial, declared, best, best.fields.keys(), trial.count_in_words())


def _walks(values: Sequence[object], own: object) -> list[list[object]]:
    """Return the values of an axis above one, ascending, and those below it, descending; each word separately."""
    if any(isinstance(v, str) for v in values) or not isinstance(own, int):
        return [[v] for v in values if v != own]
    numbers = [v for v in values if isinstance(v, int)]
    return [[v for v in numbers if v > own], [v for v in reversed(numbers) if v < own]]


def _walked(trial: _Trial, best: _Tried, name: str, walk: Iterable[object]) -> _Tried:
    """Return the best tile along a walk, which ends when two successive tiles are slower, do not fit or are refused."""
    slower = 0
    for value in walk:
        if trial.count() >= MOST_TRIED or slower > 1:
            break
        tried = trial.tried({**best.fields, name: value})
        is_better = tried is not None and tried.seconds < best.seconds * (1 - WORTH)
        if tried is None or tried.seconds > best.seconds or (is_better and trial.refusal(tried.fields)):
            slower += 1
        elif is_better:
            best, slower = tried, 0
    return best


def _open(
    group: Iterable[Mapping[str, object]], tiling: Tiling, named: Collection[str], standing: Collection[str] = ()
) -> Iterator[dict[str, object]]:
    """Yield the settings that change no named field; fields that do not belong to the tile are removed from them.

    A named field that is ``standing`` agrees with any value.
    """
    for setting in group:
        fields = {n: v for n, v in setting.items() if n in tile_fields(type(tiling))}
        agreeing = (n in standing or getattr(tiling, n) == fields[n] for n in fields if n in named)
        if any(n not in named for n in fields) and all(agreeing):
            yield {n: v for n, v in fields.items() if n not in named}


@dataclass
class _Trial:
    """Times of a ``problem``, which is the call or a part of it, by fields of the tiling."""

    schedule: Schedule
    device: DeviceSpec
    called: AnyProblem
    problem: AnyProblem
    precision: Precision
    tiling: Tiling
    l2: L2State | None
    _known: dict[Tiling, _Tried | None] = field(default_factory=dict, init=False)
    #: Seconds by program: a size above the tensor's builds an equal program, which is not timed again.
    _seconds: dict[ProgramContent, float] = field(default_factory=dict, init=False)

    def count(self) -> int:
        """Return the number of simulated tiles."""
        return sum(tried is not None for tried in self._known.values())

    def count_in_words(self, *, is_last: bool = False) -> str:
        """Return the number of simulated tiles, and the simulated part of the call."""
        if (p := self.problem.attention) is not None and self.problem != self.called:
            return f"of {self.count()} tried on {p.batch * p.heads} heads of {p.seq_kv} tokens"
        return f"of {self.count()} tried" + (" on the call" if is_last else "")

    def fastest(self) -> list[_Tried]:
        """Return the two fastest tiles so far, and the fastest tile that differs from the declared one in one field.

        In a short call each slot has few blocks, so that small tiles seem faster than they are.
        """
        ranked = sorted(filter(None, self._known.values()), key=lambda tried: tried.seconds)
        return [*ranked[:2], *[tried for tried in ranked if len(tried.fields) == 1][:1]]

    def better(self, best: _Tried, fields: Mapping[str, object], *, by: float = 0.0) -> _Tried:
        """Return the time of a tile if it is below the best time by the share ``by``, else the best time."""
        tried = self.tried(fields)
        return tried if tried is not None and tried.seconds < best.seconds * (1 - by) else best

    def tried(self, fields: Mapping[str, object]) -> _Tried | None:
        """Return the time of a tile, and its differences from the declared tile; None if the tile does not fit."""
        try:
            tiling = _with(self.tiling, fields)
            if tiling not in self._known:
                self._known[tiling] = None
                self._known[tiling] = self._simulated(tiling, fields)
            return self._known[tiling]
        except (NpusimError, ImportError):  # it does not fit, or nothing can be compiled
            return None

    def refusal(self, fields: Mapping[str, object]) -> str:
        """Return the fault of a tile's program: a race, or another fault of a run."""
        try:
            check(self._fitted(_with(self.tiling, fields))[1], self.device.flags)
        except NpusimError as error:
            return one_line(error)
        return ""

    def _fitted(self, tiling: Tiling) -> tuple[Tiling, TileProgram]:
        tiling, program = self.schedule.fitted(self.problem, tiling, self.device, self.precision, is_hinted=False)
        return tiling, starting_with(program, self.device, self.l2)

    def _simulated(self, tiling: Tiling, fields: Mapping[str, object]) -> _Tried:
        tiling, program = self._fitted(tiling)
        content = ProgramContent(program)
        seconds = self._seconds.get(content)
        if seconds is None:
            streams = Streams(program, self.device, content.templates)
            timing = method_named("auto")(program, self.device, trace_groups=(), streams=streams)
            seconds = self._seconds.setdefault(content, timing.latency_s)
        return _Tried(seconds, _changed(tiling, self.tiling) if fields else {})


def judged_problem(problem: AnyProblem, most: int = PAIRS, heads: int = 0) -> AnyProblem:
    """Return the problem on which tiles of an attention are compared: shortened, then with fewer heads, until it is
    cheap to simulate; other problems are unchanged.

    The returned problem has at most ``most`` pairs.  Heads are reduced first as long as there are more than ``heads``
    KV heads (0: never).
    """
    if (p := problem.attention) is None:
        return problem
    while p.heads * p.pairs() > most:
        less: dict[str, object] = {}
        if not p.lengths and p.batch > 1:
            less = {"batch": p.batch // 2}
        elif p.kv_heads > 1:
            less = {"heads": p.kv_heads // 2 * p.group_size, "kv_heads": p.kv_heads // 2}
        is_long = not p.lengths and p.seq_q == p.seq_kv >= 2 * SHORTEST
        if is_long and not (less and 0 < heads < p.batch * p.kv_heads):
            less = {"seq_q": p.seq_q // 2, "seq_kv": p.seq_kv // 2}
        if not less:
            break
        p = p.model_copy(update=less)
    return p


def final_problem(problem: AnyProblem) -> AnyProblem:
    """Return the problem on which the last few tiles are compared: ``problem``, or a part of it that is affordable.

    Sequences are not shortened while there are more than `HEADS` KV heads, so that L2 misses the part's data if it
    misses all heads' data.
    """
    p = problem.attention
    are_alike = p is not None and not p.lengths and p.pairs() == p.batch * p.seq_q * p.seq_kv
    return judged_problem(problem, FINAL_PAIRS_ALIKE if are_alike else FINAL_PAIRS, HEADS)
