"""A schedule as the rest of npusim sees it: fields, presets of precision, and a builder, for each core family.

If a buffer overflows, sizes with default values are reduced; an error names sizes that would fit.
"""

from __future__ import annotations

import inspect
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import field, fields, replace
from itertools import product
from math import inf
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast, get_args

from npusim.config.core_units import CastRounding, MultiplyAdd
from npusim.config.family import AS_FAMILY
from npusim.config.load import list_devices, load_device
from npusim.config.messages import choices, suggest
from npusim.config.model import file_name
from npusim.config.problem import Dtype, Problem, Sizes
from npusim.config.tiling import Tiling, build_tiling, names_of, tiling_fields
from npusim.config.workload import IGNORABLE
from npusim.errors import BufferOverflowError, SpecError, TilingError
from npusim.formats import BLOCK_FORMATS, DIVISIONS, LIBRARIES, SCALE_RULES, VARIANTS, get_arithmetic, stored_format
from npusim.formats.reductions import ORDERS
from npusim.kernels.attention.online_softmax import P_SCALE, Accumulate, ScaleIn, Sink
from npusim.late_methods import dataclass
from npusim.machines import published_kernels
from npusim.units import ascii_digits

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray

    from npusim.config.device import DeviceSpec
    from npusim.config.family import CoreFamily
    from npusim.config.problem import AnyProblem
    from npusim.machines.published_kernel import PublishedKernel
    from npusim.program.ir.tile_program import TileProgram


#: Arguments of a reference, in order.
REFERENCE = ("q", "k", "v", "problem", "row", "tiling")
#: FlashAttention-2 (its README): "all head dimensions up to 256".
LARGEST_HEAD = 256
#: Number of tokens above which no tile grows: because every field of a tiling is smaller.
LONG_ENOUGH = 8192
#: Errors for a schedule that lacks an ability that a problem needs (`Sizes.needs`).
_LACKING: Mapping[str, str] = MappingProxyType(
    {
        "scales": "schedule {} does not apply the scales of float8 inputs; all of them must be 1",
        "lengths": "lengths: schedule {} needs sequences of equal length (--batch, --seq)",
        "unseen": "unseen: schedule {} does not have this choice: its kernel has no parameter `unseen`",
    }
)
#: A builder receives a problem, a tiling and a precision of its schedule's classes.
Builder = Callable[[Any, Any, "DeviceSpec", Any], "TileProgram"]
#: A function that builds the program of one problem, device and precision.
Build = Callable[[Any], "TileProgram"]


class _LateFields:
    """A class of tiling fields, or a function that returns it, which is called on first use.

    The fields of a core family are imported only for a device of the family.
    """

    def __get__(self, schedule: Schedule | None, _owner: type[Schedule]) -> type[Tiling]:
        if schedule is None:
            raise AttributeError  # a field without a default
        stored = vars(schedule)
        if not isinstance(stored["_tiling"], type):
            stored["_tiling"] = stored["_tiling"]()
        result: type[Tiling] = stored["_tiling"]
        return result

    def __set__(self, schedule: Schedule, value: type[Tiling] | Callable[[], type[Tiling]]) -> None:
        vars(schedule)["_tiling"] = value


#: Returns a head (rows, columns) of an input by tensor name, batch and head.
InputHeads = Callable[[str, int, int], "NDArray[Any]"]


class ExactResults(Protocol):
    """The results of a kernel of plain tensors, computed in float64 by the kernel itself."""

    def rows(self, inputs: InputHeads, batch: int, head: int, row: int, rows: int) -> NDArray[np.float64]:
        """Return rows (rows, columns) of the output."""

    def results(
        self, inputs: InputHeads, computed: Mapping[str, Mapping[tuple[int, int], tuple[int, int]]]
    ) -> Mapping[tuple[str, int, int], NDArray[Any]]:
        """Return rows of all tensors that the kernel stores, by name, batch and head; NaN where it stores nothing.

        ``computed``: first row and number of rows, by name, and by batch and head.
        """


@dataclass(frozen=True)
class Schedule:
    """One algorithm on one core family.

    name, summary
        Name of the schedule, and its description in one line.
    family
        Core family.
    precisions, default_precision
        Presets by name; name of the default.
    build
        ``build(problem, tiling, device, precision)`` returns the tile program; it raises
        :class:`~npusim.errors.TilingError` (or its subclass ``BufferOverflowError``) if the program does not fit.
    tiling
        Class of the tiling fields.
    problem
        Class of the problem.
    reads_scales
        Whether the schedule undoes the scales of float8 inputs.
    hw
        Packaged device of the schedule. Empty: the default device of runs.
    study
        ``study(problem, device)`` returns the reason why no real kernel has this time, or an empty text. Runs note the
        reason; searches omit the schedule.
    beside
        Presets whose error and time a run reports in addition to the error and time of its own preset.
    origin
        File and line of a schedule from outside the package, for its errors.
    unsupported
        ``unsupported(device)`` returns the reason why the schedule does not run on a device of the family, or an empty
        text.
    inputs
        Function that returns the default format of Q, K and V on a device. None: the format of the workload.
    left
        ``left(device)`` returns the fields that a declared space leaves at their defaults: fields without effect on the
        device, results of a compiler, and fields whose default is already the best value.
    declared
        ``declared(tiling, device, problem, precision)`` returns the tiling with the device's defaults of unnamed
        fields.
    reference
        ``reference(q, k, v, problem, row, tiling)`` returns the exact result in float64. None: softmax(QK^T)V over the
        keys that ``sees`` selects.
    sees
        ``sees(problem, tiling)`` returns ``function(q, k)``, whether a query sees a key.
    is_hooked
        Whether the schedule transforms scores by a function of the user.
    elsewhere
        ``elsewhere(family)`` returns the attributes of the schedule on a core family of an installed package, or None
        if the schedule does not run there.  If this attribute is None, the schedule runs only on its own family.
    takes_lengths, is_of_decoding
        Whether the sequences of a call may differ in length; whether each sequence has one query.
    models
        Features beyond plain attention that the schedule computes (``softcap``, ``window``, ...). Runs do not refuse
        them.
    sizes
        Sizes of the problem by name, with the values that they have in launches that do not state them (True and False:
        1 and 0; 0: no such size).
    follows
        Functions ``(problem, inputs, batch, head)`` that compute inputs of plain tensors from other inputs, for calls
        that do not give these inputs.
    grows
        ``grows(problem, tiling)`` returns those of the sizes ``batch``, ``heads`` and ``tokens`` that may grow without
        changing the results of the existing batches, heads and tokens.
    is_stated
        Whether unnamed fields of the tile have the values of the launch or of the recorded call (Triton's defaults if
        the launch states none). Runs choose no other values; ``explore`` and ``tune`` do.
    """

    name: str
    family: str
    summary: str
    precisions: Mapping[str, Precision]
    default_precision: str
    build: Builder
    tiling: _LateFields = _LateFields()
    problem: type[Sizes] = Problem
    reads_scales: bool = False
    hw: str = ""
    study: Callable[[Any, DeviceSpec], str] | None = None
    beside: tuple[str, ...] = ()
    origin: str = ""
    unsupported: Callable[[DeviceSpec], str] = lambda _device: ""
    inputs: Callable[[DeviceSpec], Dtype | None] = lambda _device: None
    left: Callable[[Any], frozenset[str]] = lambda _device: frozenset()
    declared: Callable[[Tiling, DeviceSpec, AnyProblem, Precision], Tiling] = lambda tiling, *_of: tiling
    reference: Callable[..., Any] | None = None
    sees: Callable[[Any, Any], Any] | None = None
    is_hooked: bool = False
    elsewhere: Callable[[str], Mapping[str, Any] | None] | None = None
    takes_lengths: bool = False
    takes_unseen: bool = False
    is_of_decoding: bool = False
    models: tuple[str, ...] = ()
    sizes: Mapping[str, float] = field(default_factory=dict)
    #: ``exact(problem, tiling)``: the results in float64; None: the results of the schedule's program on cores that
    #: compute in float64.
    exact: Callable[[Any, Any], ExactResults] | None = None
    follows: Mapping[str, Callable[[Any, Any, int, int], Any]] = field(default_factory=dict)
    #: Shape and format of each tensor of a recorded launch, under ``tensors``; such a launch has no sizes by name.
    shapes: Mapping[str, Any] = field(default_factory=dict)
    grows: Callable[[Any, Any], Collection[str]] = lambda *_of: ()
    is_stated: bool = False

    def __post_init__(self) -> None:
        if wrong := [name for name in self.models if name not in IGNORABLE]:
            raise SpecError(f"schedule {self.name}: models: unknown {wrong[0]!r}{choices(wrong[0], IGNORABLE)}")
        if self.reference is not None and "attention" in self.problem.features:
            _check_reference(self.name, self.reference)
        try:
            file_name(self.name)  # folders of runs are named after it
        except ValueError as error:
            raise SpecError(f"schedule {error}") from None

    def changed(self, **changes: object) -> Schedule:
        """Return the schedule with other attributes; this does not import tiling fields that are imported on
        first use.
        """
        return replace(self, **cast("dict[str, Any]", {"tiling": vars(self)["_tiling"], **changes}))

    def precision(self, text: str | None = None) -> Precision:
        """Return the preset that ``text`` names, with the changes that it states: ``name,field=value,...``.

        Without a name the changes apply to the default preset.
        """
        return choose_precision(self.name, self.precisions, self.default_precision, text or "")

    def tiled(self, values: Mapping[str, object] | Tiling) -> Tiling:
        """Return the tiling with the named fields; raise `TilingError` as `build_tiling` and `check_kernel` do."""
        self.check_kernel(dict(values).get("kernel"))
        return build_tiling(self.tiling, values)

    def check_kernel(self, named: object) -> None:
        """Raise `TilingError` for a named published kernel (None: no name) that the schedule does not have."""
        if why := self.kernel_refusal(named):
            raise TilingError(why)

    def kernel_refusal(self, named: object) -> str:
        """Return why the schedule has no published kernel of this name, with the cores and schedules that have it.

        Empty if the schedule has the kernel, for None, and for a name that no packaged kernel has (the field refuses
        it).
        """
        field, here = self.tiling.model_fields.get("kernel"), f"{self.name} on {self.family} cores has"
        if named is None:
            return ""
        if field is None:
            return f"kernel={named}: {here} no published kernel; the published kernels are {published_kernels.listed()}"
        if named not in (has := names_of(field)) and (home := published_kernels.home(named)):
            return f"kernel={named}: a kernel of {home}; {here} {', '.join(sorted(has)) or 'none'}"
        return ""

    def presets(self, device: DeviceSpec) -> tuple[str, ...]:
        """Return the names of presets whose operands the device's matrix units multiply."""
        known = {"", *(fmt for unit in device.matrix_engines.values() for fmt in unit.arithmetic)}
        return tuple(name for name, p in self.precisions.items() if getattr(p, "operands", "") in known)

    @property
    def has_bits(self) -> bool:
        """Whether the schedule computes bits: attention and kernels of plain tensors do, whole models do not."""
        return self.problem.has_bits

    @property
    def against(self) -> str:
        """Description of the reference against which errors are measured."""
        if self.reference is not None:
            return f"{getattr(self.reference, '__name__', 'its reference')}() in float64"
        if "attention" not in self.problem.features:
            return "the kernel itself in float64"
        seen = " of the visible keys" if self.sees else ""
        hooked = " (it does not include your function of scores: pass reference=)" if self.is_hooked else ""
        return f"softmax(QK^T)V{seen} in float64{hooked}" if self.origin else "float64"

    def sized(self, problem: AnyProblem) -> AnyProblem:
        """Return the problem with the usual sizes in place of missing sizes, and with switches as 0 or 1."""
        return problem.with_usual(self.sizes) if self.sizes else problem

    def program(
        self, problem: AnyProblem, tiling: Tiling, device: DeviceSpec, precision: Precision, *, is_hinted: bool = True
    ) -> TileProgram:
        """Return the program; if a buffer overflows and ``is_hinted``, the error names smaller blocks that fit."""
        self._refuse(problem, device)
        try:
            return self._noted(self.build(problem, tiling, device, precision), problem, device)
        except BufferOverflowError as error:
            if not is_hinted:
                raise
            fitting = largest_that_fit(self._few_blocks(problem, device, precision), tiling)
            raise BufferOverflowError(f"{error}; {fitting}") from None

    def fitted(
        self, problem: AnyProblem, tiling: Tiling, device: DeviceSpec, precision: Precision, *, is_hinted: bool = True
    ) -> tuple[Tiling, TileProgram]:
        """Return the tiling and its program; sizes that were not given are halved until the program fits.

        The program's notes name the halved sizes; ``is_hinted`` as for :meth:`program`.
        """
        self._refuse(problem, device)
        tiling = self.declared(tiling, device, problem, precision)
        try:
            return tiling, self._noted(self.build(problem, tiling, device, precision), problem, device)
        except BufferOverflowError:
            smaller = fitted_defaults(self._few_blocks(problem, device, precision), tiling)
            if smaller is None and not is_hinted:
                raise
        if smaller is None:
            return tiling, self.program(problem, tiling, device, precision, is_hinted=is_hinted)
        program = self.program(problem, smaller, device, precision)
        moved = [f"{k}={v}" for k, v in smaller if v != getattr(tiling, k)]
        note = f"{' '.join(moved)}: {SMALLER}"
        return smaller, replace(program, notes=(*program.notes, note))

    def _noted(self, program: TileProgram, problem: AnyProblem, device: DeviceSpec) -> TileProgram:
        """Return the program, with notes if no real kernel has its time, or if no published kernel supports its head
        size.
        """
        notes = program.notes
        if self.study and (study := self.study(problem, device)):
            notes = (study, *notes)
        if (size := problem.widest_head) > LARGEST_HEAD:
            beyond = f"{LARGEST_HEAD}, the largest head size of FlashAttention-2's kernels"
            notes = (*notes, f"head size: {size} is beyond {beyond}")
        return replace(program, notes=notes)

    def _refuse(self, problem: AnyProblem, device: DeviceSpec) -> None:
        if why := self.unsupported(device):
            raise SpecError(f"{self.name}: {why}")
        self.check_kind(problem)
        if self.sizes:
            self._check_sizes(problem.sizes)
        able = {"scales": self.reads_scales, "lengths": self.takes_lengths, "unseen": self.takes_unseen}
        for name, lacking in _LACKING.items():
            if name in problem.needs and not able[name]:
                raise SpecError(lacking.format(self.name))

    def check_kind(self, problem: AnyProblem) -> None:
        """Raise `SpecError` for a problem of another kind than the schedule's."""
        if not isinstance(problem, self.problem):
            wanted = self.problem.asked_with
            if self.sizes:
                stated = {n: size for n, size in self.sizes.items() if size or isinstance(size, bool)}
                wanted = f"sizes have names: use --problem {','.join(f'{n}={size:g}' for n, size in stated.items())}"
            raise SpecError(f"schedule {self.name} needs {wanted}")

    def _check_sizes(self, sizes: Mapping[str, int | float]) -> None:
        """Raise `SpecError` for a size that the schedule does not have, or that is not an integer; a switch is 0
        or 1.
        """
        for n, size in sizes.items():
            usual = self.sizes.get(n)
            fits = size in (0, 1) if isinstance(usual, bool) else size >= 1
            if isinstance(usual, float):
                fits = 0 < size < inf
            fits = fits or size == usual  # 0: none
            is_kind = isinstance(size, int | type(usual)) and isinstance(size, bool) <= isinstance(usual, bool)
            if usual is None or not is_kind or not fits:
                kinds = {bool: " (0 or 1)", float: " (any positive number)"}
                known = ", ".join(f"{m}{kinds.get(type(x), '')}" for m, x in self.sizes.items())
                raise SpecError(
                    f"problem: {self.name} has no size {n}={size}; allowed: whole numbers from 1 for {known}"
                )

    def _few_blocks(self, problem: AnyProblem, device: DeviceSpec, precision: Precision) -> Build:
        """Return a builder of a program with only a few of the tiles of ``problem``: whether it fits does not depend on
        their number.
        """
        problem = problem.few(LONG_ENOUGH)
        return lambda tiling: self.build(problem, tiling, device, precision)


def _check_reference(called: str, reference: Callable[..., Any]) -> None:
    """Raise `SpecError` for a reference that cannot be called as references are."""
    try:
        inspect.signature(reference).bind(*REFERENCE)
    except TypeError:
        name, takes = getattr(reference, "__name__", "reference"), inspect.signature(reference)
        raise SpecError(
            f"schedule {called}: reference: {name}{takes}, but npusim calls it with {len(REFERENCE)}: "
            f"{', '.join(REFERENCE)}"
        ) from None
    except ValueError:  # this is a C function without a signature
        return


# ---------------------------------------------------------------- sizes that fit

#: Fields whose defaults may shrink, in the order of the cost: with fewer rows of a slice there are only more slices;
#: with one slot, loads wait for work; with smaller blocks or pieces of rows, K and V are loaded more often.
SHRINKING = ("vector_rows", "buffers", "piece", "tile_q", "tile_kv", "block_kv", "block_q", "block")
#: Note on the fields that shrank.
SMALLER = "smaller than the default, which does not fit"
#: Number of halvings of one field that are tried.
_HALVINGS = 4
#: Number of values of one field that are tried one by one, from the largest.
_TRIED = 1024


def open_sizes(tiling: Tiling) -> list[str]:
    """Return the sizes without a named value, which may be halved if the tile does not fit."""
    return [f for f in SHRINKING if f in type(tiling).model_fields and f not in tiling.model_fields_set]


def fitted_defaults(build: Build, tiling: Tiling) -> Tiling | None:
    """Return ``tiling`` with the fewest halvings of sizes without a named value, so that ``build`` fits.

    None if no such tiling fits: the error then names a tiling that does.
    """
    free = open_sizes(tiling)
    choices = [list(_halved(tiling, field)) for field in free]

    ranked = sorted(product(*(range(len(c)) for c in choices)), key=lambda at: (sum(at), at[::-1]))
    for at in ranked[1:]:
        values = {f: c[i] for f, c, i in zip(free, choices, at, strict=True) if i}
        smaller = tiling.model_copy(update=values)
        if _fits(build, smaller):
            return smaller
    return None


def largest_that_fit(build: Build, tiling: Tiling) -> str:
    """Return, for each block size and for slices, its largest value that fits with the current values of the others.

    For a kernel whose source states its blocks, these are the stages of its loops.
    """
    fitting_fields, fields = [], tiling_fields(type(tiling))
    has_blocks = any(f.name.startswith("block") for f in fields)
    for one in fields:
        is_size = one.name in SHRINKING or one.name.startswith("block")
        if not is_size and (has_blocks or one.name != "stages"):
            continue
        now, step = effective(tiling, one.name) or 0, one.multiple_of or 1
        values: Sequence[int] = range(now - now % step, 0, -step) if now else ()

        def does_fit(value: int, name: str = one.name) -> bool:
            return _fits(build, tiling.model_copy(update={name: value}))

        if len(values) > _TRIED:  # with this many values, a size is assumed to fit if a larger size fits
            values = values[bisect_left(values, True, key=does_fit) :]
        fitting = next(filter(does_fit, values), now)
        if fitting and fitting < now:
            fitting_fields.append(f"{one.name}={fitting}")
    if not fitting_fields:
        return (
            "a smaller block does not fit either"
            if has_blocks
            else ("`explore -f FIELD=VALUE,...` lists the tiles that fit")
        )
    return f"largest values that fit, each with the other fields unchanged: {' or '.join(fitting_fields)}"


def _fits(build: Build, tiling: Tiling) -> bool:
    try:
        build(tiling)
    except TilingError:
        return False
    return True


def effective(tiling: Tiling, field: str) -> int | None:
    """Return the value of a field that is a number, or, if it is open and gives the rows of a slice, that number of
    rows; None for other fields.
    """
    value, info = getattr(tiling, field, None), type(tiling).model_fields.get(field)
    extra = info.json_schema_extra if info is not None else None
    if value is None and isinstance(extra, dict) and isinstance(elements := extra.get("elements"), int):
        return max(1, elements // int(dict(tiling).get("block_kv") or 1))
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _halved(tiling: Tiling, field: str) -> Iterator[int | None]:
    """Yield the value of a field and its halves, down to its limit."""
    value, limits = effective(tiling, field) or 0, type(tiling).model_fields[field].metadata
    step = next((m.multiple_of for m in limits if hasattr(m, "multiple_of")), 1)
    yield getattr(tiling, field)
    for _ in range(_HALVINGS):
        value //= 2
        if value < step or value % step:
            return
        yield value


#: Fields whose values are names, such as exponentials and orders of a row sum, with the allowed names.
NAMED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "exp_variant": tuple(f"{f}.{v}" for f in ("exp", "exp2") for v in VARIANTS[f]),
        "div_variant": ("", *DIVISIONS),
        "functions": LIBRARIES,
        "sum_order": ORDERS,
        "accumulate": get_args(Accumulate),
        "sink": get_args(Sink),
        "rounding": get_args(CastRounding),
        "smooth": ("", "k"),
        "scale_in": get_args(ScaleIn),
        "multiply_add": get_args(MultiplyAdd),
        "exponent": (*get_args(MultiplyAdd), "scaled"),
        **dict.fromkeys(("scale_rule", "p_rule"), tuple(r.name for r in SCALE_RULES.values() if not r.reads_tensor)),
    }
)


class Precision(Protocol):
    """Format of every intermediate of one schedule, and its named choices, under a preset's name.

    A frozen dataclass; ``name,field=value`` may change its fields.
    """

    @property
    def name(self) -> str:
        """Name of the preset."""

    def formats(self) -> dict[str, str]:
        """Return ``{intermediate: format}``."""


PrecisionType = TypeVar("PrecisionType", bound=Precision)


def as_family(preset: PrecisionType, family: CoreFamily) -> PrecisionType:
    """Return a preset with the family's values of its fields that are `AS_FAMILY`.

    Raises `SpecError` for a value of the manifest that the field does not allow.
    """
    for name, value in family.presets.items():
        if value not in NAMED[name]:
            listed = choices(value, NAMED[name])
            raise SpecError(f"core family {family.name}: presets: {name}: {value!r} is not allowed{listed}")
    open_fields = [f.name for f in fields(cast("Any", preset)) if getattr(preset, f.name) == AS_FAMILY]
    values = {name: family.preset(name) for name in open_fields}
    return cast("PrecisionType", replace(cast("Any", preset), **values)) if values else preset


def changed_fields(precision: Precision) -> tuple[str, ...]:
    """Return the fields of a preset that a text changed; the preset's name lists them."""
    return tuple(part.partition("=")[0] for part in precision.name.split(",")[1:])


def for_inputs(precision: PrecisionType, fmt: str, kernel: PublishedKernel | None = None) -> PrecisionType:
    """Return the preset with ``input`` replaced by the inputs' format, and with a ``kernel``'s decisions."""
    chosen: Any = {n: fmt for n, f in precision.formats().items() if f == "input"}
    if kernel is not None and kernel.output_of_8_bits and stored_format(fmt).bits == 8:
        chosen |= {"output": kernel.output_of_8_bits} if "output" in chosen else {}
        is_open = getattr(precision, "p_scale", None) == 1 and "p_scale" not in changed_fields(precision)
        chosen |= {"p_scale": P_SCALE} if is_open else {}
    if getattr(precision, "exponent", None) == "":
        chosen["exponent"] = "once" if kernel is not None and kernel.is_fused else "scaled"
    return cast("PrecisionType", replace(cast("Any", precision), **chosen))


def multiplies(device: DeviceSpec, fmt: str) -> bool:
    """Return whether a device's file states the arithmetic of its matrix unit for a format."""
    return any(fmt in unit.arithmetic for unit in device.matrix_engines.values())


def able_devices(fmt: str) -> str:
    """Return which of the packaged devices multiply a format."""
    return ", ".join(name for name in list_devices() if multiplies(load_device(name), fmt)) or "none"


def choose_precision(schedule: str, presets: Mapping[str, Precision], default: str, text: str) -> Precision:
    """Return the preset named in ``text`` with the changes that follow: ``name,field=value,...``.

    Raises `SpecError` for an unknown preset or field (the message lists the known ones), for two presets, for a field
    that is named twice, and for a text that is not a value of the field; `FormatError` for an unknown number format or
    matrix arithmetic.
    """
    names, changes = list[str](), dict[str, str]()
    for part in text.split(","):
        key, equals, value = part.strip().partition("=")
        if equals and key in changes:
            raise SpecError(f"precision field {key!r} is given twice: {changes[key]} and {value}")
        if equals:
            changes[key] = value
        elif key:
            names.append(key)
    if len(names) > 1:
        raise SpecError(f"precision {', '.join(names)}: name at most one preset, then use field=value")
    name = names[0] if names else default
    if name not in presets:
        able = (
            f" on these cores; packaged devices that multiply it: {able_devices(name)}" if name in BLOCK_FORMATS else ""
        )
        raise SpecError(f"precision {name!r}: not a preset of {schedule}{able or suggest(name, list(presets))}")
    return _changed(presets[name], changes)


def precision_fields(preset: Precision) -> list[str]:
    """Return the fields of a preset that a text may change, except the field of its published kernel."""
    return [f.name for f in fields(cast("Any", preset)) if f.name not in ("name", "kernel")]


def _changed(preset: Precision, changes: Mapping[str, str]) -> Precision:
    known = precision_fields(preset)
    values: dict[str, object] = {}
    for key, text in changes.items():
        if key not in known:
            raise SpecError(f"precision field {key!r}: {preset.name} has no field of that name{choices(key, known)}")
        values[key] = _value(preset, key, text)
    if values:
        values["name"] = ",".join([preset.name, *(f"{k}={v}" for k, v in changes.items())])
    return cast("Precision", replace(cast("Any", preset), **values))


def _value(preset: Precision, key: str, text: str) -> object:
    old = getattr(preset, key)
    if isinstance(old, bool):
        if text.lower() not in ("true", "false"):
            raise SpecError(f"precision field {key}: {text!r} is neither true nor false")
        return text.lower() == "true"
    if isinstance(old, float):
        try:
            return float(ascii_digits(text))
        except ValueError:
            raise SpecError(f"precision field {key}: {text!r} is not a number") from None
    if key in preset.formats() and text != "input":
        return stored_format(text).name
    if key == "arithmetic" and text:
        return get_arithmetic(text).name
    if key in NAMED and text not in NAMED[key]:
        allowed = ", ".join(NAMED[key])
        raise SpecError(f"precision field {key}: {text!r} is not one of {allowed}")
    return text
