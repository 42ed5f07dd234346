"""A request: the object that passes the options from the command line to the program; only this file names each option.

This module imports nothing that is slow to load, because help texts use it.
"""

from __future__ import annotations

import inspect
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, fields, replace
from functools import partial, wraps
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal, TypedDict, TypeVar, cast, get_args

from npusim.errors import SpecError
from npusim.kernels.triton import SIGN, is_launch, is_recorded, launch_parts
from npusim.late_methods import dataclass
from npusim.units import format_value, parse_count

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from numpy.typing import NDArray

    from npusim.config.device import DeviceSpec, L2State
    from npusim.config.node_file import NodeSpec
    from npusim.config.problem import AnyProblem, CacheFormat, Dtype, Problem
    from npusim.config.tiling import Tiling
    from npusim.config.workload import Workload
    from npusim.library import Schedule
    from npusim.program.numerics.evaluate import Choice


Function = TypeVar("Function", bound="Callable[..., Any]")
DEFAULT_HW = "ascend_910b2"
DEFAULT_WORKLOAD = "pangu_38b"
#: Options with their values, in the order in which the command line has them; a flag has no value.
Asked = tuple[tuple[str, str], ...]
#: Fields of a problem that a call may change: visible keys, scores, queries, and the storage of K and V.
CALL = (
    *("window", "sinks", "prefix", "chunk", "documents", "softcap", "alibi", "bias"),
    *("query_lengths", "page", "cache", "cache_scale", "unseen"),
)
#: Options that kernels of plain tensors read as attention does.
OF_ROWS = ("tensors", "rows", "heads", "seed", "presets")
#: Options of the launch of a Triton kernel, which may also be part of its name.
LAUNCH = ("args", "grid", "constexpr", "num_warps", "num_stages")
#: Axes of Q, K and V.
Layout = Literal["bnsd", "bsnd", "bsh", "tnd"]


def short_name(schedule: str) -> str:
    """Return a schedule's name for sentences: the kernels of a launch, the file of a recorded call, or else its
    name.
    """
    if is_recorded(schedule):
        return schedule.rpartition("/")[2]
    launches = launch_parts(schedule)[1].split(";")
    return " + ".join(text.partition("[")[0].strip() for text in launches) or schedule


def absolute(schedule: str) -> str:
    """Return a kernel's name with the absolute path of its file."""
    for separator in (SIGN, ":"):
        path, sign, rest = schedule.partition(separator)
        if sign and path.endswith((".py", ".npz")):
            return f"{Path(path).resolve()}{sign}{rest}"
    return str(Path(schedule).resolve()) if schedule.endswith((".py", ".npz")) else schedule


def schedule_name(schedule: object) -> Any:
    """Return the name of a schedule; for a recorded call, the name that verbs accept."""
    return schedule if isinstance(schedule, str) else getattr(schedule, "schedule", schedule)


@dataclass(frozen=True, slots=True)
class Option:
    """How a command line states one field of a request.

    ``names`` are its spellings, ``metavar`` the placeholder of its value (empty: a flag), ``panel`` the heading of its
    help; ``choices`` are all its values, if these can be listed; ``typed`` is its default as a user types it, and
    ``shown`` the default in the help; ``needs`` are the words of `NEEDS` of which a run must fulfil one for the option
    to have an effect.
    """

    names: tuple[str, ...]
    metavar: str
    panel: str
    help: str
    choices: tuple[str, ...] = ()
    typed: object = None
    shown: str | bool = True
    needs: tuple[str, ...] = ()


def names_and_metavar(usage: str) -> tuple[tuple[str, ...], str]:
    """Return the names of an option and its placeholder, for ``--out -o DIR``; empty for a flag."""
    names = tuple(word for word in usage.split() if word.startswith("-"))
    return names, " ".join(usage.split()[len(names) :])


def _option(panel: str, usage: str, text: str, default: Any = None, needs: str = "", **more: Any) -> Any:
    """Return a field of a request with its option: ``usage`` are its names and its placeholder."""
    names, metavar = names_and_metavar(usage)
    more.setdefault("typed", default if isinstance(default, str | bool) else None)
    more.setdefault("shown", bool(metavar or "choices" in more))
    return field(
        default=default, metadata={"option": Option(names, metavar, panel, text, needs=tuple(needs.split()), **more)}
    )


#: Headings of options that change the run, and headings of options that change what is computed or shown.
_ASKED, _SHOWN = ("Problem", "Device", "How"), ("Bits", "Output")
_what, _where, _how = (partial(_option, panel) for panel in _ASKED)
_seen = partial(_what, needs="workload attention")
_bits, _output = (partial(_option, panel) for panel in _SHOWN)
#: Conditions that options may require of a run, and the message for an option whose condition does not hold.
NEEDS: Mapping[str, str] = MappingProxyType(
    {
        "workload": "--problem already states the sizes; remove these options",
        "model": "--problem already states the sizes, without a model; remove these options",
        "attention": (
            "these options are for schedules of attention, and this schedule computes no attention; remove them"
        ),
        "device": "these options are for kernels on one device; remove them for a node or for a model's layers",
        "time": "these options are for devices with a timing model, and this device has none; remove them",
        "tensors": "these options have an effect only with --tensors; remove them",
        "drawn": "these options have an effect only on drawn inputs, but --tensors gives tensors; remove them",
        "bits": (
            "these options have an effect only on bits, which this run does not compute (--no-numerics, or a "
            "model's layers); remove them"
        ),
    }
)
#: A size of a call: an integer, or its text, ``"8k"``.
Count = int | str
#: Value of ``trace_groups`` for the core group that ends last.
LAST: Final = "last"
Groups = Sequence[int] | Literal["last"]
#: Types of those fields for which no other check refuses a wrong value with a message.
_KINDS: Mapping[str, tuple[tuple[type, ...], str]] = MappingProxyType(
    {
        "overrides": ((Mapping,), "a mapping of dotted keys to values"),
        "scale": ((Mapping,), "a mapping of units to factors of their rates"),
        "precision": ((str,), "the name of a preset, as text"),
        "tensors": ((str, Path, Mapping), "a file, a name or a mapping of arrays"),
        "tensor_prefix": ((str,), "text"),
        "trace_groups": ((Iterable,), "numbers of core groups"),
    }
)


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request for one run; its fields are the arguments of `npusim.run`, where they are described."""

    schedule: str = field(kw_only=False)
    workload: str | Path | Workload | None = _what(
        "--workload -w NAME|FILE",
        "Model: a name of npusim workload list, or your own .yaml.",
        needs="model",
        shown=DEFAULT_WORKLOAD,
    )
    seq: Count | None = _what("--seq TOKENS", "Queries and keys: 4096, or 8k.", needs="workload")
    seq_q: Count | None = _what("--seq-q TOKENS", "Number of queries; default: --seq.", needs="workload")
    seq_kv: Count | None = _what("--seq-kv TOKENS", "Number of keys; default: --seq.", needs="workload")
    phase: Literal["prefill", "decode"] | None = _what(
        "--phase",
        "decode: one query a sequence, over all --seq keys.",
        choices=("prefill", "decode"),
        shown="prefill",
        needs="workload",
    )
    batch: Count | None = _what("--batch N", "Number of sequences.", needs="workload")
    shape: str | None = _what(
        "--shape SIZES",
        "Sizes in one word: B4,N32/8,S1/8k,D128 (batch, query/KV heads, queries/keys, head size).",
        needs="workload attention device",
    )
    q_heads: Count | None = _what(
        "--q-heads N",
        "Number of query heads on one device; --kv-heads defaults to the same number.",
        needs="workload attention device",
    )
    kv_heads: Count | None = _what(
        "--kv-heads N", "Number of KV heads on one device.", needs="workload attention device"
    )
    head_dim: Count | None = _what(
        "--head-dim N", "Elements of a head of Q, K and V.", needs="workload attention device"
    )
    lengths: Sequence[int] | None = _what(
        "--lengths TOKENS,...",
        "Number of keys of each sequence, if they differ: 3000,100,8k; in split_kv each has one query, elsewhere "
        "as many queries as keys.",
        needs="workload attention device",
    )
    query_lengths: Sequence[int] | None = _what(
        "--query-lengths TOKENS,...",
        "Number of queries of each sequence, its last tokens: 1,1,512 for a batch of decoding steps and prompts.",
        needs="workload attention device",
    )
    page: Count | None = _what(
        "--page KEYS",
        "K and V are stored in pages of this many keys, in random order; each page is a separate transfer.",
        needs="workload attention device",
    )
    cache: CacheFormat | None = _what(
        "--cache FORMAT",
        "Format in which K and V are stored, with scales; attention converts their tiles to --dtype.",
        choices=("float8_e4m3fn", "int8"),
        needs="workload attention",
    )
    cache_scale: Literal["token", "head", "channel"] | int | None = _what(
        "--cache-scale token|head|channel|KEYS",
        "Keys of a KV head that share a float32 scale: one, all, or a number; channel: one scale for each channel.",
        shown="token",
        needs="workload attention",
    )
    tensor_parallel: Count | None = _what(
        "--tensor-parallel --tp N",
        "Number of devices that share the heads; the run simulates one device's share.",
        needs="workload",
    )
    causal: bool | None = _what(
        "--causal/--no-causal", "Causal mask or no mask; default: the workload's.", needs="workload attention"
    )
    window: int | tuple[int, int] | None = _seen(
        "--window KEYS|BEFORE,AFTER",
        "Keys that a query sees, including its own: 512; or keys before and after it: 256,256 (-1: all).",
    )
    sinks: Count | None = _seen("--sinks KEYS", "First keys that every query sees in addition to the window.")
    prefix: Count | None = _seen("--prefix KEYS", "First keys that every query sees.")
    chunk: Count | None = _seen("--chunk KEYS", "Keys of a chunk; a query sees only its own chunk.")
    documents: tuple[int, ...] | None = _seen(
        "--documents KEYS,...", "Lengths of sequences that are packed end to end; each sees only itself: 3000,100,996."
    )
    unseen: Literal["zero", "nan", "mean"] | None = _seen(
        "--unseen",
        "Output of a query that sees no key: 0, NaN, or the mean of V; libraries differ.",
        choices=("zero", "nan", "mean"),
        shown="such a query is refused",
    )
    bias: Literal["shared", "head"] | None = _seen(
        "--bias",
        "Add a tensor (queries x keys) to the scores, one for all heads or one for each head.",
        choices=("shared", "head"),
        shown="none",
    )
    softcap: float | None = _seen("--softcap X", "A score s becomes X tanh(s / X).")
    alibi: bool | None = _seen(
        "--alibi/--no-alibi",
        "Add to each score the head's slope times the distance of query and key; default: the workload's.",
    )
    kind: Literal["global", "local"] | None = _seen(
        "--kind",
        "Kind of layer, if a model has several: local (a window or chunk) or global.",
        choices=("global", "local"),
        shown="the kind that sees most keys; a note states the time of the other",
    )
    dtype: Dtype | None = _what(
        "--dtype",
        "Format of Q, K and V; --tensors are rounded to it (for a float8 format, each with a scale).",
        choices=("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float32"),
        shown="the workload's",
        needs="workload",
    )
    ignore: Collection[str] = _what(
        "--ignore NAME,...",
        "Run without these features of the workload's attention: features that npusim does not model, or window, ...",
        (),
        needs="workload attention",
    )
    problem: AnyProblem | None = _what(
        "--problem KEY=VALUE,...",
        "Sizes of schedules other than attention: m=4096,n=4k,k=4k; bytes=1MiB for copy; tokens=1k,heads=2 for "
        "ssd, gated_delta and flash_backward; a Triton launch uses the names in it.",
    )
    hw: str | Path | DeviceSpec | NodeSpec | None = _where(
        "--hw NAME|FILE",
        "Device: a name of npusim hw list, or your own .yaml.",
        shown=f"{DEFAULT_HW}, or the schedule's own device",
    )
    overrides: Mapping[str, object] | None = _where(
        "-C KEY=VALUE", "Change one number of the device, by its dotted key; may be repeated."
    )
    scale: Mapping[str, object] | None = _where(
        "--scale UNIT=FACTOR",
        "What if a unit or link had another rate: VECTOR=0.5 halves it, hbm=2 doubles it; may be repeated.",
        needs="device time",
    )
    clock: float | None = _where(
        "--clock CLOCK",
        "Clock to which the cores are locked: 1500MHz, 1.5GHz; default: not locked, limited by power.",
        needs="device",
    )
    power_watts: float | None = _where(
        "--power-watts WATTS", "Power limit of the board: 500; default: the device file's.", needs="device"
    )
    tiling: Mapping[str, object] | Tiling | None = _how(
        "--tiling -t FIELD=VALUE,...",
        "Tiling fields: -t block_kv=256,depth=2; may be repeated; npusim chooses the other fields.",
    )
    eager: bool = _how(
        "--eager",
        "For standard: one kernel for each operator, as frameworks run it (-t operators=eager).",
        False,
        needs="device",
    )
    args: str | None = _how("--args NAME=VALUE,...", "Arguments of a Triton kernel; they may use the problem's names.")
    grid: str | None = _how("--grid X[,Y[,Z]]", "Grid of a Triton kernel: 'seq_q//BM,batch*heads'.")
    constexpr: str | None = _how("--constexpr NAME=VALUE,...", "Constexpr parameters of a Triton kernel.")
    num_warps: int | None = _how("--num-warps N", "Number of warps of a program of a Triton kernel.", shown="4")
    num_stages: int | None = _how(
        "--num-stages N", "Number of tiles in flight (num_stages) of a Triton kernel.", shown="3"
    )
    precision: str | None = _how(
        "--precision NAME[,FIELD=FORMAT]",
        "Formats of all intermediates: a preset, optionally with changes: fa2_fp32,scores=float16.",
        shown="the schedule's",
    )
    arithmetic: str | None = _how(
        "--arithmetic NAME",
        "Arithmetic of matrix units: hopper.wgmma.k16.f16.f32, ...; default: the device's.",
        needs="device",
    )
    l2: L2State | None = _where(
        "--l2",
        "Content of L2 when the kernel starts: clean, nothing useful; dirty, other data to be written back; warm, "
        "the inputs; steady, the state after equal launches on other inputs; repeated, on the same inputs.",
        choices=("clean", "dirty", "warm", "steady", "repeated"),
        shown="the device's",
        needs="device time",
    )
    method: str = _how(
        "--method NAME",
        "Method of simulation: auto; des (SimPy, the reference), block, fold, steady: exact; reserved: approximate.",
        "auto",
        needs="time",
    )
    tensors: str | Path | Mapping[str, NDArray[Any]] | None = _bits(
        "--tensors FILE|NAME",
        "Your own Q, K and V, or packaged ones: .safetensors or .npz with keys q, k, v, and bias (on a node: w_o).",
        needs="attention",
    )
    tensor_prefix: str = _bits(
        "--tensor-prefix TEXT",
        "Prefix of the tensors' keys: <prefix>.q; needed if a file has several.",
        "",
        shown=False,
        needs="attention tensors",
    )
    layout: Layout = _bits(
        "--layout",
        "Axes of Q, K and V, in --tensors and in memory; bsh cuts heads of the workload's size.",
        "bnsd",
        choices=get_args(Layout),
        needs="attention",
    )
    padding: Literal["nan"] | None = _bits(
        "--padding",
        "nan: fill the keys of K and V that no query sees with NaN; the run reports the affected outputs.",
        choices=("nan",),
        needs="attention bits",
    )
    rows: Choice = _bits(
        "--rows WHICH",
        "Query rows to compute: sample (the last 128), all, or 0,128,4000-4095 (their whole Q blocks).",
        "sample",
        needs="attention bits",
    )
    heads: Choice = _bits("--heads WHICH", "Heads to compute: sample, all, or 0,2.", "sample", needs="attention bits")
    seed: int | None = _bits("--seed N", "Seed of tensors drawn from the recipe.", needs="attention bits drawn")
    numerics: bool = _bits("--no-numerics", "Time only, no bits.", True, typed=False)
    diagnose: bool = _bits(
        "--diagnose",
        "Report ranges, resonance, underflow, lost mass and saturation too.",
        False,
        needs="attention device bits",
    )
    presets: bool | None = _bits(
        "--presets/--no-presets",
        "Show the results of the schedule's other presets on the same rows.",
        False,
        typed=None,
        shown="where a schedule has some",
        needs="attention device bits",
    )
    trace_groups: str | Sequence[int] = _output(
        "--trace-groups WHICH",
        "Core groups on the timeline: 0,7; default: the one that ends last.",
        LAST,
        shown="last",
        needs="time",
    )
    timeline: tuple[float, float] | None = _output(
        "--timeline FROM:TO",
        "Part of the timeline to write, in us: 0:50.",
        shown="all of it; for a long run, the beginning",
        needs="time",
    )
    limit_s: float | None = None
    progress: Callable[[float], None] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "schedule", schedule_name(self.schedule))
        for name, (kinds, words) in _KINDS.items():
            value = getattr(self, name)
            if value is not None and not isinstance(value, kinds):
                raise SpecError(f"{name}: expected {words}, got {value!r}")
        self._fold_shape()
        for name in OPTIONS:
            value = getattr(self, name)
            if isinstance(value, str) and not value.strip() and name != "tensor_prefix":
                raise SpecError(f"{name}: {value!r} is empty; write a value, or remove the option")
            if isinstance(value, str) and OPTIONS[name].metavar in ("TOKENS", "KEYS", "N") and name != "seed":
                object.__setattr__(self, name, whole_number(name, value))

        if self.precision is not None and not all(part.strip() for part in self.precision.split(",")):
            raise SpecError(f"precision {self.precision!r}: a part is empty; write a preset, then field=format, ...")
        if self.problem is not None and not (isinstance(self.problem, Mapping) or hasattr(self.problem, "model_dump")):
            raise SpecError(f"problem: expected a problem, or a mapping of its sizes, got {self.problem!r}")
        self._fold_launch()
        is_plain = self.is_launch and ("tensor(" in self.schedule or is_recorded(self.schedule))
        if is_plain or (not hasattr(self.problem, "model_dump") and self._names_sizes()):
            from npusim.config.problem import KernelProblem

            object.__setattr__(self, "problem", KernelProblem.of(cast("Any", self.problem)))
        elif isinstance(self.problem, Mapping):
            from npusim.config.problem import problem_of

            object.__setattr__(self, "problem", problem_of(self.problem))

    @property
    def is_launch(self) -> bool:
        """Whether the schedule is a launch of a Triton kernel, recorded or written."""
        return is_launch(self.schedule)

    def _names_sizes(self) -> bool:
        from npusim.library import names_sizes

        return names_sizes(self.schedule)

    def _fold_launch(self) -> None:
        """Make the options of a launch part of the schedule's name, ``kernel.py::name[grid](arguments)``."""
        values = {name: getattr(self, name) for name in LAUNCH if getattr(self, name) is not None}
        if not values:
            return
        if not self.is_launch or is_recorded(self.schedule) or "(" in self.schedule:
            refuse(values, "options of a Triton kernel that is named without its launch, kernel.py::name")
        words = [values[n] for n in ("args", "constexpr") if n in values]
        words += [f"{n}={values[n]}" for n in ("num_warps", "num_stages") if n in values]
        object.__setattr__(self, "schedule", f"{self.schedule}[{values.get('grid', 1)}]({', '.join(words)})")
        for name in values:
            object.__setattr__(self, name, None)

    def _fold_shape(self) -> None:
        """Set the fields to the sizes that ``shape`` states."""
        if self.shape is None:
            return
        for name, size in shape_sizes(self.shape).items():
            if getattr(self, name) is not None:
                raise SpecError(f"shape {self.shape}: states the same size as {name}; remove one of them")
            object.__setattr__(self, name, size)
        object.__setattr__(self, "shape", None)

    @classmethod
    def of(cls, entries: Mapping[str, Any]) -> Request:
        """Return the request with the known entries of a file."""
        return cls(**{f.name: entries[f.name] for f in fields(cls) if f.name in entries})

    def sizes(self) -> dict[str, Any]:
        """Return the values that replace a workload's sizes, mask and format."""
        names = "seq", "seq_q", "seq_kv", "batch", "lengths", "dtype", "tensor_parallel", "causal", "ignore", "kind"
        sizes = {name: getattr(self, name) for name in (*names, *CALL)}
        if self.kv_heads is not None and self.q_heads is None:
            raise SpecError("kv_heads: it sets only the heads of K and V; set q_heads too")
        if self.q_heads is not None and self.tensor_parallel is not None:
            raise SpecError("q_heads: states the heads of one device; remove tensor_parallel")
        if self.tensors is not None:
            named = {"q_heads": self.q_heads, "kv_heads": self.kv_heads, "head_dim": self.head_dim}
            refuse(named, "the tensors already have the sizes; remove these options")
        sizes |= {"heads": self.q_heads, "kv_heads": self.kv_heads, "head_dim": self.head_dim}
        if self.phase == "decode" or self._decodes_lengths():
            refuse({"seq_q": self.seq_q}, "--phase decode has one query for each sequence; remove it")
            sizes["seq_q"] = 1
        return sizes

    def _decodes_lengths(self) -> bool:
        """Return whether each sequence has one query by default if lengths are given."""
        if any(value is not None for value in (self.phase, self.seq_q, self.tensors, self.query_lengths)):
            return False
        is_sized = (self.seq, self.seq_kv, self.batch) != (None, None, None)
        lengths = self.lengths or (() if is_sized else self.load().lengths)
        return bool(lengths) and self.find_schedule().is_of_decoding

    def load(self) -> Workload:
        """Return the workload; raise `SpecError` as `load_workload`."""
        from npusim.config.load import load_workload

        load = DEFAULT_WORKLOAD if self.workload is None else self.workload
        return load_workload(load) if isinstance(load, str | Path) else load

    def title(self, load: Workload) -> str:
        """Return the name of the inputs: the workload, or the tensors if no workload is named."""
        if self.tensors is None or self.workload is not None:
            return load.name
        return Path(self.tensors).stem if isinstance(self.tensors, str | Path) else "tensors"

    def machine(self) -> DeviceSpec:
        """Return the device or node with its changed numbers; raise `SpecError` as `load_machine`."""
        from npusim.config.load import scaled
        from npusim.config.node_file import load_machine
        from npusim.kernels.declare.define import unread_keys

        held = {"held_clock_hz": self.clock, "held_power_w": self.power_watts}
        set_to = {key: value for key, value in held.items() if value is not None}
        machine = load_machine(self.named_device(), {**(self.overrides or {}), **set_to}, unread_keys)
        return scaled(machine, self.scale) if self.scale else machine

    def placed(self) -> Request:
        """Return the request with absolute paths of its files, for a process whose working folder may differ."""
        named = {
            n: x for n in ("hw", "workload") if isinstance(x := getattr(self, n), str | Path) and Path(x).is_file()
        }
        files: dict[str, Any] = {n: str(Path(x).resolve()) for n, x in named.items()}
        return replace(self, schedule=absolute(self.schedule), **files)

    def find_schedule(self) -> Schedule:
        """Return the schedule on the cores of the device; raise `SpecError` if there is no such schedule."""
        from npusim.library import find_schedule

        return find_schedule(self.schedule, self.machine().family)

    def changed_precision(self) -> str:
        """Return the requested precision, with the matrix arithmetic as one of its changes."""
        return ",".join(filter(None, (self.precision, self.arithmetic and f"arithmetic={self.arithmetic}")))

    def named_device(self) -> str | Path | DeviceSpec | NodeSpec:
        """Return the requested device, or the schedule's default device."""
        from npusim.library import default_hw

        return default_hw(self.schedule, DEFAULT_HW) if self.hw is None else self.hw

    def chosen_tiling(self, kind: type[Tiling]) -> Mapping[str, object] | Tiling:
        """Return the fields of the tiling that are set; raise `SpecError` if ``eager`` is set for a schedule without
        that field.
        """
        if not self.eager:
            return self.tiling or {}
        if "operators" not in kind.model_fields:
            raise SpecError(f"--eager: schedule {self.schedule} is one kernel; standard runs operator by operator")
        return {**dict(self.tiling or {}), "operators": "eager"}  # a Tiling yields its fields, like a mapping

    def refuse_unread(self, features: Collection[str], sizes: Iterable[str] = ()) -> None:
        """Raise `SpecError` that names the options that are set but have no effect; ``features``: words of `NEEDS`.

        ``sizes``: names of the schedule's sizes.
        """
        changed, named = self.changed(), " ".join(filter(None, ("--problem", ",".join(f"{n}=.." for n in sizes))))
        for need, why in NEEDS.items():
            if need not in features:
                read = OF_ROWS if need == "attention" and "plain" in features else ()
                unread = {n: value for n, value in changed.items() if need in OPTIONS[n].needs and n not in read}
                refuse(unread, why.replace("--problem", named) + (_hint("heads") if "heads" in unread else ""))

    def changed(self) -> dict[str, object]:
        """Return the fields of options that differ from their defaults."""
        values = {f.name: (getattr(self, f.name), f.default) for f in fields(self) if f.name in OPTIONS}
        return {
            n: value for n, (value, usual) in values.items() if not isinstance(value, type(usual)) or value != usual
        }

    def attention(self) -> Problem:
        """Return the workload's attention on one device, with replaced sizes."""
        return self.load().problem(**self.sizes())

    def about(self) -> dict[str, object]:
        """Return the problem and the device, in the words of a search's results."""
        about: dict[str, object] = {"device": (device := self.machine()).name}
        about |= {"scale": device.scale} if device.scale else {}
        if self.problem is None:
            about["workload"] = self.title(self.load())
        if self.problem is not None or self.tensors is None:  # otherwise the tensors' sizes are those of the problem
            problem = self.problem or self.attention()
            shapes: Mapping[str, Any] = {}
            if self._names_sizes() or is_recorded(self.schedule):
                schedule = self.find_schedule()
                problem, shapes = schedule.sized(problem), schedule.shapes
            about["problem"] = {**problem.model_dump(mode="json"), **shapes}
        return about

    def asked(self) -> Asked | None:
        """Return the options that reproduce the run on a command line.

        None where no command line can state the run: a problem or a device created in Python, or arrays as tensors.
        """
        if self.tensors is not None or self.arithmetic is not None or self.layout != "bnsd":
            return None
        words: list[tuple[str, str]] = []
        for name, option in OPTIONS.items():
            value = getattr(self, name)
            if option.panel not in _ASKED or value is None or value in (option.typed, ()):
                continue
            of_option = _as_words(option, value)
            if of_option is None:
                return None
            words += of_option
        return tuple(words)


OPTIONS: Mapping[str, Option] = MappingProxyType(
    {f.name: f.metadata["option"] for f in fields(Request) if "option" in f.metadata}
)


class CallOptions(TypedDict, total=False):
    """Options of one call: the problem, the device and the method, in the names of `Request`."""

    workload: str | Path | Workload | None
    seq: Count | None
    seq_q: Count | None
    seq_kv: Count | None
    phase: Literal["prefill", "decode"] | None
    batch: Count | None
    shape: str | None
    q_heads: Count | None
    kv_heads: Count | None
    head_dim: Count | None
    lengths: Sequence[int] | None
    query_lengths: Sequence[int] | None
    page: Count | None
    cache: CacheFormat | None
    cache_scale: Literal["token", "head", "channel"] | int | None
    unseen: Literal["zero", "nan", "mean"] | None
    tensor_parallel: Count | None
    causal: bool | None
    window: int | tuple[int, int] | None
    sinks: Count | None
    prefix: Count | None
    chunk: Count | None
    documents: tuple[int, ...] | None
    softcap: float | None
    alibi: bool | None
    bias: Literal["shared", "head"] | None
    kind: Literal["global", "local"] | None
    dtype: Dtype | None
    ignore: Collection[str]
    problem: AnyProblem | None
    hw: str | Path | DeviceSpec | NodeSpec | None
    overrides: Mapping[str, object] | None
    scale: Mapping[str, object] | None
    clock: float | None
    power_watts: float | None
    tiling: Mapping[str, object] | Tiling | None
    args: str | None
    grid: str | None
    constexpr: str | None
    num_warps: int | None
    num_stages: int | None
    eager: bool
    precision: str | None
    arithmetic: str | None
    l2: L2State | None
    method: str


class TensorOptions(CallOptions, total=False):
    """Options of calls that accept tensors."""

    tensors: str | Path | Mapping[str, NDArray[Any]] | None
    tensor_prefix: str
    layout: Layout


class SeedOptions(CallOptions, total=False):
    """Options of calls whose tensors are drawn."""

    seed: int | None


class BitsOptions(TensorOptions, SeedOptions, total=False):
    """Options of calls that compute bits."""

    padding: Literal["nan"] | None
    rows: Choice
    heads: Choice
    numerics: bool


class RunOptions(BitsOptions, total=False):
    """Options of a run and of its display."""

    diagnose: bool
    presets: bool | None
    trace_groups: str | Sequence[int]
    timeline: tuple[float, float] | None
    limit_s: float | None
    progress: Callable[[float], None] | None


def takes_options(options: type) -> Callable[[Function], Function]:
    """Decorate a function of ``**options``: its signature shows each option with type and default, and other options
    are refused.
    """

    def decorated(function: Function) -> Function:
        *others, _ = inspect.signature(function).parameters.values()
        known = {f.name: f for f in fields(Request)}
        named = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=known[name].default, annotation=known[name].type
            )
            for name in options.__annotations__
        ]
        signature = inspect.signature(function).replace(parameters=[*others, *named])

        @wraps(function)
        def called(*positional: Any, **by_name: Any) -> Any:
            try:
                signature.bind(*positional, **by_name)
            except TypeError as error:
                unknown = next((name for name in by_name if name not in signature.parameters), None)
                from npusim.config.messages import suggest

                near = suggest(unknown, [*signature.parameters]) if unknown else ""
                raise TypeError(f"{function.__name__}() {error}{near}") from None
            return function(*positional, **by_name)

        called.__signature__ = signature  # type: ignore[attr-defined]  # what help and editors show
        return cast("Function", called)

    return decorated


def _as_words(option: Option, value: Any) -> list[tuple[str, str]] | None:
    """Return one option as words; None if its value cannot be written as words."""
    from npusim.config.problem import Sizes
    from npusim.config.tiling import Tiling

    name = min(option.names, key=len)
    if isinstance(value, bool):
        return [(name.split("/")[not value], "")]
    if isinstance(value, Tiling):
        value = value.model_dump(exclude_unset=True)
    if isinstance(value, Sizes):
        if (sizes := value.named_sizes()) is None:
            return None
        value = [f"{key}={format_value(item)}" for key, item in sizes.items()]
        if not value:  # a recorded call has no such value
            return []
    if isinstance(value, dict | MappingProxyType):
        return [(name, f"{key}={format_value(item)}") for key, item in value.items()]
    if isinstance(value, list | tuple | set | frozenset):
        return [(name, ",".join(map(format_value, value)))]
    return [(name, format_value(value))] if isinstance(value, str | int | float | Path) else None


def command(verb: str, schedule: str, options: Iterable[tuple[str, str]], more: Iterable[str]) -> str:
    """Return ``npusim <verb> <schedule> ...``, quoted for a shell."""
    words = ["npusim", verb, schedule]
    for option, value in options:
        words += [option, value] if value else [option]
    return " ".join(shlex.quote(word) for word in (*words, *more))


#: Pattern of a part of a shape: a letter, and one or two sizes.
_SHAPE = re.compile(r"([BNSD])(\w+)(?:/(\w+))?", re.IGNORECASE | re.ASCII)
#: The fields of each letter, for one size and for two sizes.
_LETTERS: Mapping[str, tuple[str, tuple[str, ...]]] = MappingProxyType(
    {
        "B": ("batch", ()),
        "N": ("q_heads", ("q_heads", "kv_heads")),
        "S": ("seq", ("seq_q", "seq_kv")),
        "D": ("head_dim", ()),
    }
)


def shape_sizes(text: str) -> dict[str, int]:
    """Return the sizes of ``B4,N32/8,S6k,D128`` by field of a request; raise `SpecError` for another form.

    Examples
    --------
    >>> shape_sizes("B4,N32/8,S6k,D128")
    {'batch': 4, 'q_heads': 32, 'kv_heads': 8, 'seq': 6144, 'head_dim': 128}
    """
    sizes: dict[str, int] = {}
    for part in str(text).split(","):
        match = _SHAPE.fullmatch(part.strip())
        one, two = _LETTERS[match[1].upper()] if match else ("", ())
        if match is None or (match[3] and not two):
            how = (
                "B4,N32/8,S6k,D128: batch, query/KV heads, tokens (or queries/keys), head size; each part may "
                "be omitted"
            )
            raise SpecError(f"shape {text}: {part.strip()!r} is not a size; write {how}")
        for name, size in zip(two if match[3] else (one,), match.groups()[1:], strict=False):
            if name in sizes:
                raise SpecError(f"shape {text}: {match[1].upper()} occurs twice")
            sizes[name] = whole_number(f"shape {text}: {match[1].upper()}", size)
    return sizes


def whole_number(name: str, text: str) -> int:
    """Return an integer from its typed form: ``4096``, ``8k``; raise `SpecError` with its name."""
    try:
        return parse_count(text)
    except ValueError:
        raise SpecError(f"{name} {text}: write a positive whole number: 4096, 8k (8,192), 1M") from None


def _hint(option: str) -> str:
    from npusim.program.numerics.evaluate import HINTS  # this import loads numpy, which help texts do not need

    return HINTS[option]


def refuse(options: Mapping[str, object], why: str) -> None:
    """Raise `SpecError` with the options that are set but would change nothing."""
    names = [name for name, value in options.items() if value is not None and value != ()]
    if names:
        raise SpecError(f"{', '.join(names)}: {why}")
