"""A core family as one value, its manifest: the facts that npusim needs about the family before it imports the machine.

The package registers its families as installed packages register theirs, by an entry point; `registered` loads a
manifest once, and the manifest is checked then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, get_args

from npusim.config import outside
from npusim.config.messages import choices
from npusim.config.packaged import installed
from npusim.config.tiling import Blocks, Tiling
from npusim.errors import SpecError
from npusim.late_methods import dataclass

if TYPE_CHECKING:
    from npusim.config.device import DeviceSpec
    from npusim.config.problem import Problem

#: Entry points of installed packages that bring a family: ``name = "package.module:FAMILY"``.
MACHINES = "npusim.machines"
#: The entry points of npusim's core families, in the order of lists.
FAMILIES: Mapping[str, str] = MappingProxyType(
    {"ascend": "npusim.machines.ascend:ASCEND", "nvidia": "npusim.machines.sm:NVIDIA", "cpu": "npusim.machines.sm:CPU"}
)
#: Several devices, which no device file names as its family.
NODE_FAMILY = "node"
_NODE = "npusim.machines.node_family:NODE"

#: Kinds of processors; kernels may state different defaults and presets for each kind.
Processor = Literal["npu", "gpu", "cpu"]
#: Kinds of kernels, for which a machine adds tiling fields to the kernel's.  ``attention``: an attention kernel, whose
#: whole tile the machine describes; ``splits``: attention with split keys; ``stages``: a kernel that states its blocks
#: itself; ``chunks``: a recurrence that is computed chunk by chunk; ``compiled``: code from a compiler; ``product``,
#: ``rows``, ``operators``: matrix products, operations on rows, and operators of a framework; ``plain``: all other
#: kernels.
Kind = Literal["attention", "splits", "stages", "chunks", "compiled", "product", "rows", "operators", "plain"]
#: Settings of fields that a call tries, in groups; the call uses the best of each group.
Settings = Sequence[Sequence[Mapping[str, object]]]
#: The value of a preset's field that means the family's value.
AS_FAMILY = "as the family"
#: Fields of presets that may be `AS_FAMILY`, and the value of each if a manifest does not state it.
_PRESETS: Mapping[str, str] = MappingProxyType({"exp_variant": "exp.correct", "sum_order": "", "accumulate": "fresh"})


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreFamily:
    """The manifest of a core family.

    name
        Name of the family in device files, and of its entry point.
    machine
        Class of the machine, or ``module:Name``, which is imported at its first use.
    processor
        Kind of the devices (``npu``, ``gpu``, ``cpu``). Kernels state fields and presets by this kind.
    decisions
        Named tuple of the decisions of a kernel of the family; every decision has a default.
    fields
        Tiling fields of the machine by kind of kernel, as classes or ``module:Name``. Empty: kernels need only their
        own fields. Schedules of a kind that is not listed do not run on the family.
    usual
        Published kernel whose choices apply to an attention if neither the tiling nor the preset names a kernel.
    presets
        Values of the preset fields that are `AS_FAMILY`: ``exp_variant``, ``sum_order``, ``accumulate``.
    layer_attention
        Attention of a layer's prefill if the user names none: a schedule with its fields, or ``module:function``, which
        returns one for a problem and a device.
    settings
        Settings that a call tries in addition to its declared tile, under a name that the machine defines; the default
        name is ``attention``.
    unread
        Keys of device files (patterns) that have no effect on the family, each with the feature that would read it.
        ``-C`` refuses these keys.
    cores, sole, parts
        Kinds of core that a device file must describe; kinds of which a core group has exactly one; other required
        parts of the file, ``flags`` or ``launch``.
    issued
        ``module:Class`` that times programs with explicit instructions, flags and barriers. The class is constructed
        from the path of a file and a device; its method ``time`` receives the instructions of a core group. Empty: the
        family times no such programs.
    written
        ``module:function`` that returns a tile program as the text of a program with explicit instructions, flags and
        barriers. Empty: programs of the family have no such text.

    Raises `SpecError` if the manifest lacks a field or contradicts itself.
    """

    name: str = ""
    machine: str | type[Any] = ""
    processor: Processor = "npu"
    decisions: type[Any] | None = None
    fields: Mapping[Kind, str | type[Tiling]] = field(default_factory=lambda: {"attention": Blocks, "stages": ""})
    usual: str = ""
    presets: Mapping[str, str] = field(default_factory=dict)
    layer_attention: str = "flash"
    settings: Mapping[str, Settings] = field(default_factory=dict)
    unread: Mapping[str, str] = field(default_factory=dict)
    cores: tuple[str, ...] = ()
    sole: tuple[str, ...] = ()
    parts: tuple[Literal["flags", "launch"], ...] = ()
    issued: str = ""
    written: str = ""

    def __post_init__(self) -> None:
        if fault := _fault(self):
            raise SpecError(f"core family {self.name or 'without a name'}: {fault}")

    def fields_of(self, kind: Kind) -> type[Tiling] | None:
        """Return the machine's tiling fields for a kind of kernel; None if its kernels need only their own fields.

        Raises `SpecError` for a kind that the family does not run, or if the manifest names no tiling fields.
        """
        if kind not in self.fields:
            raise SpecError(f"core family {self.name} runs no kernels of the kind {kind!r}")
        named = self.fields[kind]
        cls = named and resolved(named)
        if cls == "" or (isinstance(cls, type) and issubclass(cls, Tiling)):
            return cls or None
        raise SpecError(f"core family {self.name}: fields of {kind!r}: {named} is not a Tiling")

    def attention_of(self, problem: Problem, device: DeviceSpec) -> str:
        """Return the attention of a layer's prefill if the user names none: a schedule with its fields."""
        chosen = self.layer_attention
        return str(resolved(chosen)(problem, device)) if "." in chosen else chosen

    def preset(self, field: str) -> str:
        """Return the family's value of a preset's field that is `AS_FAMILY`."""
        return self.presets.get(field) or _PRESETS[field]


def _fault(family: CoreFamily) -> str:
    """Return what a manifest lacks or contradicts; empty if it has no fault."""
    if not family.name:
        return "name: missing; it is the name of the family in device files"
    if not isinstance(family.machine, type) and ":" not in family.machine:
        return f"machine: {family.machine or 'missing'}; a class of npusim.machine.Machine, or module:Name"
    allowed: tuple[tuple[str, tuple[object, ...], Sequence[str]], ...] = (
        ("processor", (family.processor,), get_args(Processor)),
        ("fields", tuple(family.fields), get_args(Kind)),
        ("presets", tuple(family.presets), tuple(_PRESETS)),
        ("sole", family.sole, family.cores),
        ("parts", family.parts, ("flags", "launch")),
    )
    for what, given, known in allowed:
        if wrong := [str(x) for x in given if x not in known]:
            return f"{what}: {wrong[0]!r} is not allowed{choices(wrong[0], [n for n in known if n])}"
    for key in family.unread:
        core = key.split(".")[1] if key.startswith("cores.") and family.cores else "*"
        if core not in ("*", *family.cores):
            return f"unread: {key}: its devices have no cores.{core}{choices(core, family.cores)}"
    if family.decisions is not None and not _has_defaults(family.decisions):
        return f"decisions: {family.decisions.__name__} is not a named tuple whose fields all have defaults"
    for name, groups in family.settings.items():
        if not all(isinstance(setting, Mapping) for group in groups for setting in group):
            return f"settings: {name}: must be groups of mappings from tiling fields to values"
    return ""


def _has_defaults(decisions: type[Any]) -> bool:
    known: tuple[str, ...] = getattr(decisions, "_fields", ())
    return bool(known) and getattr(decisions, "_field_defaults", {}).keys() == set(known)


def resolved(named: str | type[Any]) -> Any:
    """Return the object that ``module:Name`` names, None if the module has no such name; a class is returned
    unchanged.
    """
    if isinstance(named, type):
        return named
    module, _, wanted = named.partition(":")
    return getattr(outside.module(module), wanted, None)


def is_registered(name: str) -> bool:
    """Return whether a core family is npusim's or an installed package's."""
    return name in FAMILIES or name in installed(MACHINES)


def registered(name: str) -> CoreFamily:
    """Return the manifest of a core family, or of a node.

    Raises `SpecError` if there is no such family, its module fails to import, or its manifest has a fault.
    """
    return _registered(name, _place(name))


def module_of(name: str) -> str:
    """Return the module that contains the manifest of a core family, or the machine that is used instead of
    a manifest.
    """
    return _place(name).partition(":")[0]


def _place(name: str) -> str:
    place = _NODE if name == NODE_FAMILY else FAMILIES.get(name) or installed(MACHINES).get(name)
    if place is None:
        raise SpecError(f"no machine for {name} cores; an installed package brings one as an entry point {MACHINES}")
    return place


def running(kind: Kind) -> tuple[str, ...]:
    """Return npusim's families that run kernels of a kind."""
    return tuple([name for name in FAMILIES if kind in registered(name).fields])


@lru_cache
def _registered(name: str, place: str) -> CoreFamily:
    """Return a manifest; for an entry point that is a machine, a manifest with defaults for all other fields."""
    value = resolved(place)
    if isinstance(value, type):
        return CoreFamily(name=name, machine=value, unread=getattr(value, "unread", {}))
    if not isinstance(value, CoreFamily):
        raise SpecError(
            f"{place}: entry point {name!r} of {MACHINES} is neither an npusim.machine.Machine with a build() nor "
            "an npusim.machine.CoreFamily that names one"
        )
    if value.name != name:
        raise SpecError(f"{place}: entry point {name!r} of {MACHINES}: its manifest is of family {value.name!r}")
    return value
