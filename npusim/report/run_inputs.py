"""The inputs of a run as text and as tables: sizes, devices, workloads, the fields of a schedule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, cast

from npusim.config.layers import LOCAL
from npusim.config.workload import OF_PROBLEM, Workload
from npusim.report.text import Block, Cell, Column, Columns, Facts, Heading, cells, document, keyed
from npusim.units import format_bytes, plural

if TYPE_CHECKING:
    from npusim.config.device import DeviceSpec
    from npusim.config.tiling import TilingField
    from npusim.kernels.declare.registry import Schedule
    from npusim.kernels.triton.calls import Call, Calls
    from npusim.report.result_json import RunRecord
    from npusim.simulation.sequence import SequenceRun

#: Number of sequence lengths that a line lists.
LENGTHS = 6


def problem_text(problem: dict[str, object]) -> str:
    """Return sizes in the usual notation: ``B1 N5 S4096 d128 causal float16``.

    A matrix product is ``m128 n128 k64 float16``, a copy ``1 MiB``, a recorded launch ``X, Y (4096, 512) float16``.
    """
    p = problem
    if tensors := cast("dict[str, list[object]]", p.get("tensors")):
        alike: dict[str, list[str]] = {}
        for name, (*shape, fmt) in tensors.items():
            alike.setdefault(f"({', '.join(map(str, shape))}) {fmt}", []).append(name)
        return "; ".join(f"{', '.join(names)} {shape}" for shape, names in alike.items())
    if "bytes" in p:
        return format_bytes(int(str(p["bytes"])))
    if "seq_q" not in p:
        sizes = (
            f"{n}{x}" if len(n) == 1 else f"{n}={x}"
            for n, x in p.items()
            if n not in ("dtype", "seed", "count", "operands")
        )
        return " ".join((*sizes, str(p["dtype"])))
    filled = cast("list[int]", p.get("filled", (0, 0)))
    dims = [str(int(str(p[n])) - count) for n, count in zip(("head_dim", "value_head_dim"), filled, strict=True)]
    heads, dim = _pair(p["heads"], p["kv_heads"]), _pair(dims[0], dims[1])
    seq, mask = _pair(p["seq_q"], p["seq_kv"], "x"), "causal" if p["causal"] else "full"
    if lengths := cast("list[int]", p.get("lengths")):
        seq += f" ({', '.join(map(str, lengths[:LENGTHS]))}{', ...' if len(lengths) > LENGTHS else ''})"
    return f"B{p['batch']} N{heads} S{seq} d{dim} {' '.join((mask, *_changes(p)))} {p['dtype']}"


def _changes(problem: dict[str, object]) -> Iterator[str]:
    """Yield those other options that change visible keys and scores: ``window=512``."""
    for name in OF_PROBLEM:
        value = problem.get(name)
        if isinstance(value, list | tuple) and name != "window":
            yield f"{name}={len(value)}"
        elif value:
            yield name if value is True else f"{name}={_number(value)}"


def _pair(first: object, second: object, between: str = "/") -> str:
    return f"{first}" if first == second else f"{first}{between}{second}"


def asked_text(record: RunRecord) -> str:
    """Return the sizes of a run's problem; attention's follow the workload's name."""
    text = problem_text(record.problem)
    return f"{record.workload}: {text}" if "seq_q" in record.problem else text


def tiling_text(tiling: dict[str, object]) -> str:
    """Return tiling fields in the form in which a user writes them, without the fields that the schedule itself
    sets.
    """
    return " ".join(f"{name}={value}" for name, value in tiling.items() if value is not None)


# ---------------------------------------------------------------- devices, workloads, fields


def _number(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _allowed(field: TilingField) -> str:
    if field.choices:
        return " | ".join(map(str, field.choices))
    limits = {"multiple of": field.multiple_of, ">=": field.minimum, "<=": field.maximum}
    words = [f"{words} {limit}" for words, limit in limits.items() if limit is not None]
    return ", ".join(["power of 2", *words] if field.is_power else words)


DEVICES = Columns(
    Column("device", "name", key="name"),
    Column("family", "family", key="family"),
    Column("description", "description", key="description"),
    Column(None, lambda device: device.digest(), key="digest"),
)
WORKLOADS = Columns(
    Column("workload", "name", key="name"),
    Column("heads", lambda w: _pair(w.heads, w.kv_heads), align=">"),
    Column("head_dim", "head_dim", align=">"),
    Column("seq", "seq", align=">"),
    Column("devices", "tensor_parallel", align=">"),
    Column("description", "description", key="description"),
)


def field_columns(chosen: Collection[str]) -> Columns:
    """Return the columns of tiling fields; ``chosen``: the fields that a run chooses if they are not named."""

    def default(field: TilingField) -> object:
        if field.default is None:
            return "auto"
        return f"auto ({field.default})" if field.name in chosen else field.default

    return Columns(
        Column("-t field", "name", key="name"),
        Column("default", default, str, ">", key="default", json=attrgetter("default")),
        Column("allowed", _allowed),
        Column("", "description", key="description"),
        *keyed("minimum", "maximum", "multiple_of", "choices", "lightest", "kind", "none", "is_power"),
        Column(None, lambda field: field.name in chosen, key="chosen"),
    )


def _refused(row: tuple[int, Call]) -> str:
    return row[1].configurations[0].refused


def _compiler(row: tuple[int, Call]) -> str:
    return _refused(row) or ("read" if row[1].language else "compiles")


#: Rows are numbered calls.
CALLS = Columns(
    Column("call", 0, align=">", key="number"),
    Column("kernel", lambda row: row[1].name, key="kernel"),
    Column("grid", lambda row: " x ".join(map(str, row[1].grid)), key="grid"),
    Column("launched at", lambda row: row[1].where, key="launched_at"),
    Column("configurations", lambda row: len(row[1].configurations), align=">", key="configurations"),
    Column("compiler", _compiler, key="refused", json=_refused),
    Column(None, lambda row: row[1].language, key="language"),
    Column(None, lambda row: _unread(row[1]), key="unread"),
)
#: Kernels of a recording: the number of their launches, and why some launches are not read.
KERNELS = Columns(
    Column("kernel", "kernel"), Column("launches", "launches", align=">"), Column("read, or why not", "read")
)


def calls_table(path: str, calls: Calls) -> tuple[Block, ...]:
    """Return the content of a file of recorded calls."""
    counts = Counter((call.name, _unread(call)) for call in calls)
    kernels = [{"kernel": kernel, "launches": n, "read": why or "read"} for (kernel, why), n in counts.items()]
    made_by = dict.fromkeys(call.language or f"Triton {call.triton}" for call in calls)
    read = sum(n for (_, why), n in counts.items() if not why)
    heading = Heading(path, f"recorded with {' and '.join(made_by)}; npusim run {path}::0")
    of_all = Heading("read", f"{read} of {len(calls)} {plural(len(calls), 'launch')} as kernels of tiles")
    return (heading, CALLS.grid(enumerate(calls)), of_all, KERNELS.grid(kernels))


def calls_document(path: str, calls: Calls) -> dict[str, object]:
    """Return the content of a file of recorded calls, as JSON."""
    triton = next((call.triton for call in calls if call.triton), "")
    return document("calls", file=path, triton=triton, calls=CALLS.records(enumerate(calls)))


def _error(row: tuple[int, SequenceRun]) -> float | None:
    bits = row[1].result.numerics
    return bits.error.rmse if bits else None


#: Rows are numbered launches.
SEQUENCE = Columns(
    Column("launch", 0, align=">", key="launch"),
    Column("kernel", lambda row: row[1].kernel, key="kernel"),
    Column("latency us", lambda row: row[1].result.latency_us, ",.2f", ">", key="latency_us"),
    Column("relative RMSE", _error, ".2e", ">", key="relative_rmse"),
    Column(
        "reads results of launches",
        lambda row: ", ".join(f"{n} of {at}" for n, at in row[1].reads.items()) or None,
        key="reads",
        json=lambda row: row[1].reads,
    ),
    Column(None, lambda row: list(row[1].result.notes), key="notes"),
)


def sequence_table(path: str, runs: Sequence[SequenceRun]) -> tuple[Block, ...]:
    """Return the runs of launches that follow one another, and their total time."""
    times = [r.result.latency_us for r in runs]
    total = sum(t for t in times if t is not None)
    of_all = f"{total:,.2f} us, each launch timed by itself" if None not in times else "only bits"
    device = runs[0].result.device.name
    return (Heading(f"{path} on {device}", f"{len(runs)} launches: {of_all}"), SEQUENCE.grid(enumerate(runs)))


def sequence_document(path: str, runs: Sequence[SequenceRun]) -> dict[str, object]:
    """Return the runs of launches that follow one another, as JSON."""
    return document("sequence", file=path, launches=SEQUENCE.records(enumerate(runs)))


def _unread(call: Call) -> str:
    from npusim.kernels.triton.recorded import unread

    return unread(call)


def device_summary(device: DeviceSpec) -> str:
    """Return how many numbers of a device have each basis."""
    bases = Counter(fact.basis for _, fact in device.facts())
    numbers = ", ".join(f"{count} {basis}" for basis, count in bases.items())
    return f"{device.name}, {numbers}, digest {device.digest()}"


def workload_table(load: Workload) -> tuple[Block, ...]:
    """Return the sizes of a workload, and the problem that one device computes."""
    content = load.model_dump(mode="json", by_alias=True, exclude_none=True)
    hidden = ("schema", "name", "description")
    facts = [(key, cells(_value_text(value))) for key, value in content.items() if key not in hidden]
    facts.append(("one device", cells(problem_text(load.problem().model_dump(mode="json")))))
    if load.left_out():
        facts.append(("not modelled", not_modelled(load)))
    return (Heading(load.name, load.description), Facts(tuple(facts)))


def read_as(load: Workload) -> str:
    """Return a line on an imported workload: layers, heads, visible keys, FFN, weights, cache."""
    model = load.model(load.problem(seq=1, batch=1, tensor_parallel=1), 1)
    heads = f"{load.heads} heads of {_pair(load.head_dim, load.value_head_dim)}, {load.kv_heads} KV heads"
    stated = {n: getattr(load, n) for n in ("window", "chunk", "softcap", "alibi", "sink_logits")}
    local = f" in {load.local_layers} layers"
    rules = [f"{n}{'' if v is True else f'={_number(v)}'}{local * (n in LOCAL)}" for n, v in stated.items() if v]
    ffn = f"{'a gated' if load.gated else 'an'} FFN of {load.intermediate}"
    if (e := load.experts) is not None:
        ffn = f"{e.per_token} of {e.count} experts of {e.width} in {model.layers - e.dense_layers} layers"
    weights = f"{model.weights().total / 1e9:.3g} billion parameters"
    weights += f", {load.stored.of} in {load.stored.bits:g} bits" if load.stored else ""
    size, kind = format_bytes(model.cached.kv_bytes() * model.layers), "latents" if load.latent else "K and V"
    layers = ", ".join([f"{load.layers} layers", heads, "causal" if load.causal else "not causal", *rules])
    return f"{layers}; {ffn}; {weights}; {size} of {kind} a token"


def not_modelled(load: Workload) -> tuple[Cell, ...]:
    """Return the features that npusim does not model, which runs refuse, and the option that ignores them."""
    left_out = load.left_out()
    if not left_out:
        return ()
    missing = cells(*(f"{name}: {what}" for name, what in left_out.items()), style="warn")
    return (*missing, Cell(f"to run without them: --ignore {','.join(left_out)}"))


def _value_text(value: object) -> str:
    if isinstance(value, dict):
        return " ".join(f"{key}={inner}" for key, inner in value.items() if inner != "")
    return str(value).lower() if isinstance(value, bool) else str(value)


def fields_table(
    name: str, schedule: Schedule, fields: tuple[TilingField, ...], chosen: Collection[str] = ()
) -> tuple[Block, ...]:
    """Return the tiling fields and precision presets of a schedule on cores of its family.

    ``chosen``: fields that a run chooses if they are not named, with their declared values.
    """
    rule = "the value in brackets, or that of another simulated tile that is at least 1 % faster"
    presets = [
        (preset, cells(" ".join(f"{k}={v}" for k, v in precision.formats().items())))
        for preset, precision in schedule.precisions.items()
    ]
    return (
        Heading(f"{name} on {schedule.family} cores", schedule.summary),
        field_columns(chosen).grid(fields),
        *([Facts((("auto", cells(rule)),))] if chosen else []),
        Heading("--precision", f"default {schedule.default_precision}"),
        Facts(tuple(presets)),
    )
