"""The table of a run: time, what bounds it, pipes, links, numerics, provenance, advice."""

from __future__ import annotations

from typing import TYPE_CHECKING

from npusim.machines.tracks import track_of
from npusim.report.advice import BOUND_SHARE, advise, decoding
from npusim.report.bottleneck import basis_shares, bottleneck, deciding_group, group_ends, main_stall, queues_of
from npusim.report.text import Block, Cell, Facts, Grid, Heading, Style, cells, percent, whole
from npusim.timing.result import KINDS, method_text
from npusim.units import format_bytes, format_duration

if TYPE_CHECKING:
    from collections.abc import Mapping

    from npusim.numerics.result import NumericRecord
    from npusim.report.record import RunRecord
    from npusim.report.trial import Trial
    from npusim.simulation.robustness import Spread
    from npusim.timing.result import QueueUse, Roofline, TimingRecord

Fact = tuple[str, tuple[Cell, ...]]

_WEAK_BASES = ("assumed", "fitted", "unknown")
#: Constants on weak evidence that are named one by one, largest first.
_NAMED_CONSTANTS = 2
#: Ranges of a diagnosis by what they are of; keys end in ``_min`` and ``_max``.
_RANGES = (("K", "key"), ("K'", "shifted_key"), ("Q K^T", "raw_score"), ("in the accumulator", "score"))


def run_table(record: RunRecord, trial: Trial | None = None) -> tuple[Block, ...]:
    """Return the table that ``npusim run`` prints; ``trial`` checks what its advice suggests."""
    timing = record.timing
    blocks: list[Block] = [Heading(f"{record.schedule} on {record.device.name}", f"precision {record.precision}")]
    after = _numerics(record)
    if timing is None:
        blocks.append(Facts((*_inputs(record), ("latency", cells("not modelled on this device")))))
    else:
        blocks.append(Facts((*_inputs(record), *_time(record, timing))))
        blocks += [_pipes(timing), _links(record, timing)]
        after += _constants(timing)
    after += _presets(record)
    decode = decoding(record)
    if decode is not None:
        after.append(("decode", (Cell(decode, "warn"),)))
    after += _notes(record)
    advice = advise(record, trial)
    if advice is not None:
        tries = (Cell(f"try: {advice.command}", "good", whole=True),) if advice.command else ()
        after.append(("advice", (Cell(advice.text, "good"), *tries)))
    blocks.append(Facts(tuple(after)))
    return tuple(blocks)


def problem_text(problem: dict[str, object]) -> str:
    """Return sizes as the field writes them: ``B1 N5 S4096 d128 causal float16``.

    A matrix product is ``m128 n128 k64 float16``, a copy ``1 MiB``.
    """
    p = problem
    if "bytes" in p:
        return format_bytes(int(str(p["bytes"])))
    if "heads" not in p:
        return f"m{p['m']} n{p['n']} k{p['k']} {p['dtype']}"
    heads = f"N{p['heads']}" if p["heads"] == p["kv_heads"] else f"N{p['heads']}/{p['kv_heads']}"
    seq = f"S{p['seq_q']}" if p["seq_q"] == p["seq_kv"] else f"S{p['seq_q']}x{p['seq_kv']}"
    dim = f"d{p['head_dim']}"
    if p["value_head_dim"] != p["head_dim"]:
        dim += f"/{p['value_head_dim']}"
    mask = "causal" if p["causal"] else "full"
    return f"B{p['batch']} {heads} {seq} {dim} {mask} {p['dtype']}"


def tiling_text(tiling: dict[str, object]) -> str:
    """Return tiling fields as they are typed, without those left to the schedule."""
    return " ".join(f"{name}={value}" for name, value in tiling.items() if value is not None)


def _inputs(record: RunRecord) -> tuple[Fact, ...]:
    device = record.device
    is_node = record.timing is not None and record.timing.overlap is not None
    parts = "devices" if is_node else "core groups"
    return (
        ("problem", cells(asked_text(record))),
        *((("ignored", (Cell(", ".join(record.ignored), "warn"),)),) if record.ignored else ()),
        (
            "device",
            cells(f"{device.group_count} {parts} at {device.clock_hz / 1e9:.2f} GHz, file digest {device.digest}"),
        ),
        ("tiling", cells(tiling_text(record.tiling))),
    )


def asked_text(record: RunRecord) -> str:
    """Return the sizes of what a run computes; attention's are led by the workload's name."""
    text = problem_text(record.problem)
    return f"{record.workload}: {text}" if "heads" in record.problem else text


def _time(record: RunRecord, timing: TimingRecord) -> tuple[Fact, ...]:
    tflops = f"   ({timing.flops / timing.latency_us / 1e6:.1f} TFLOP/s)" if timing.flops else ""
    latency = (
        f"{format_duration(timing.latency_us * 1e-6)} = cores "
        f"{format_duration(timing.core_us * 1e-6)} + launch "
        f"{format_duration(timing.launch_us * 1e-6)}{tflops}"
    )
    cycles = (
        f"{whole(timing.cycles)}   ({whole(timing.operations)} operations, method "
        f"{method_text(timing.method, timing.band)})"
    )
    rows: list[Fact] = [("latency", cells(latency))]
    if timing.validated is not None:
        text = timing.validated.text(record.schedule, record.device.name)
        rows.append(("measured", (Cell(text, "" if timing.validated.cases else "warn"),)))
    if timing.overlap is None and timing.times_us and len(timing.times_us) == len(KINDS):
        kernel, apart = (format_duration(timing.times_us[kind] * 1e-6) for kind in ("kernel", "back_to_back"))
        text = f"kernel {kernel} (task duration), back_to_back {apart} a call; the latency is one call, waited for"
        rows.append(("timing", cells(text)))
    rows.append(("cycles", cells(cycles)))
    if timing.bound_cycles:
        unit, least = max(timing.bound_cycles.items(), key=lambda item: item[1])
        share = percent(least / timing.cycles) if timing.cycles else "-"
        style: Style = "bad" if least > timing.cycles else ""
        text = f"{whole(least)} cycles at least ({unit}), {share} of the kernel"
        rows.append(("bound", (Cell(text, style),)))
    rows.append(("bound by", cells(_bound_by(timing))))
    if timing.overlap is not None and timing.overlap.parts_us:
        rows.append(("parts", cells(*_parts(timing, timing.overlap.parts_us))))
    if timing.roofline is not None:
        rows.append(("roofline", cells(*_roofline(timing.roofline))))
    return tuple(rows)


def _parts(timing: TimingRecord, parts_us: dict[str, float]) -> list[str]:
    """Return what a device did, the longest first, and its share of the whole; parts may overlap."""
    ranked = sorted(parts_us.items(), key=lambda item: -item[1])
    return [f"{name} {format_duration(us * 1e-6)}, {percent(us / timing.latency_us)}" for name, us in ranked]


def _roofline(at: Roofline) -> tuple[str, str]:
    """Return which roof is above a run and how near it comes, and the intensities it has."""
    roof = "matrix units allow" if at.intensity >= at.ridge else "device memory allows"
    attained, allowed = at.attained_flops_per_s / 1e12, at.attainable_flops_per_s / 1e12
    return (
        f"{attained:.1f} of {allowed:.1f} TFLOP/s that the {roof}, {percent(at.reached)} (cores alone)",
        f"{at.intensity:,.0f} operations a compulsory byte, {at.moved_intensity:,.0f} a byte moved; "
        f"ridge {at.ridge:,.0f}",
    )


def _bound_by(timing: TimingRecord) -> str:
    found = bottleneck(timing)
    if found is None:
        return "nothing ran"
    track = track_of(found.queue.group, found.queue.queue)
    slack = timing.cycles - found.queue.busy_cycles
    busy = f"{track.pipe} of {track.core}, busy {percent(found.busy_share)}, slack {whole(slack)} cycles"
    if found.busy_share < BOUND_SHARE:
        return f"waiting; busiest is {busy}"
    return busy


def _pipes(timing: TimingRecord) -> Grid:
    group = deciding_group(timing)
    rows: list[tuple[Cell, ...]] = []
    twins = _twins(queues_of(timing, group))
    shown = ""
    for queue, names in twins:
        track = track_of(group, queue.queue)
        core = ", ".join([track.core, *names])
        rows.append(_pipe_row(timing, queue, core if core != shown else "", track.pipe))
        shown = core
    header = (_pipes_title(timing), "pipe", "busy", "operations", "waits most for", "share")
    return Grid(header, "<<>><>", tuple(rows))


def _pipes_title(timing: TimingRecord) -> str:
    ends = group_ends(timing)
    if timing.overlap is not None:
        return f"device (last of {len(ends)} to end)"
    return "core" if len(ends) < 2 else f"core (last of {len(ends)} groups to end)"


def _twins(queues: tuple[QueueUse, ...]) -> list[tuple[QueueUse, list[str]]]:
    """Return the queues of cores that worked; of a core that did as the one before, the name."""
    cores: dict[str, list[QueueUse]] = {}
    for queue in queues:
        cores.setdefault(track_of(queue.group, queue.queue).core, []).append(queue)
    kept: list[tuple[list[QueueUse], list[str]]] = []
    for core, own in cores.items():
        if not any(queue.operations for queue in own):
            continue
        if kept and _same_use(kept[-1][0], own):
            kept[-1][1].append(core.rpartition(".")[2])
        else:
            kept.append((own, []))
    return [(queue, names) for own, names in kept for queue in own]


def _same_use(a: list[QueueUse], b: list[QueueUse]) -> bool:
    def use(queue: QueueUse) -> tuple[object, ...]:
        pipe = queue.queue.rpartition(".")[2]
        return pipe, queue.busy_cycles, queue.operations, queue.end_cycles, queue.stalls

    return [use(q) for q in a] == [use(q) for q in b]


def _pipe_row(timing: TimingRecord, queue: QueueUse, core: str, pipe: str) -> tuple[Cell, ...]:
    total = max(1, timing.cycles)
    found = bottleneck(timing)
    is_bound = found is not None and found.queue == queue and found.busy_share >= BOUND_SHARE
    stall = main_stall(queue)
    cause, share = ("-", "") if stall is None else (stall[0], percent(stall[1] / total))
    return (
        Cell(core),
        Cell(pipe),
        Cell(percent(queue.busy_cycles / total), "warn" if is_bound else ""),
        Cell(whole(queue.operations)),
        Cell(cause),
        Cell(share),
    )


def _links(record: RunRecord, timing: TimingRecord) -> Grid:
    seconds = timing.core_us * 1e-6
    rows = []
    for name, size in timing.link_bytes.items():
        rate = size / seconds if seconds else 0.0
        share = rate / record.device.link_bytes_per_s[name]
        least = f"{size / timing.compulsory_bytes:,.2f}x" if timing.compulsory_bytes else ""
        rows.append(cells(name, format_bytes(size), least, f"{rate / 1e9:,.0f} GB/s", percent(share)))
    header = ("link", "bytes", "of compulsory", "achieved", "of its bandwidth")
    return Grid(header, "<>>>>", tuple(rows))


def _numerics(record: RunRecord) -> list[Fact]:
    bits = record.numerics
    if bits is None:
        return [("numerics", cells("not computed"))]
    overflow, nan = sum(bits.overflow_counts.values()), sum(bits.nan_counts.values())
    bad = overflow or nan or bits.nan_count or bits.inf_count
    events = f"overflow {whole(overflow)}   NaN {whole(nan)}"
    rows = [Cell(f"{_error(bits)}   {events}", "bad" if bad else "")]
    rows += [Cell(f"first {event}", "bad") for event in bits.first_events]
    rows += _finite(record, bits)
    rows.append(Cell(f"against {bits.against} on {bits.sample}"))
    found = [("numerics", tuple(rows))]
    if record.orders:
        found.append(("same sums", tuple(Cell(_spread(s)) for s in record.orders)))
    if bits.diagnosis is not None:
        found.append(("diagnosis", tuple(Cell(line) for line in _diagnosis_lines(bits.diagnosis.figures()))))
    used = {f"row sums in {order}": basis for order, basis in (bits.row_sums or {}).items()}
    used = {**bits.arithmetic, **used}
    if used:
        units = ", ".join(f"{name} ({evidence})" for name, evidence in used.items())
        weak = "assumed" in used.values()
        others = [Cell(_spread(s)) for s in record.spread]
        found.append(("arithmetic", (Cell(units, "warn" if weak else ""), *others)))
    return found


def _diagnosis_lines(figures: Mapping[str, float]) -> list[str]:
    """Return a line each on ranges, resonance, what became zero, and what was cut off."""
    ranges = [
        f"{name} [{figures[f'{key}_min']:,.4g}, {figures[f'{key}_max']:,.4g}]"
        for name, key in _RANGES
        if f"{key}_min" in figures
    ]
    found = [
        f"ranges: {', '.join(ranges)}",
        f"resonance: Q against K {figures['resonance_phase_degrees']:.0f} degrees at frequency "
        f"{figures['resonance_frequency']:.0f}, {figures['resonance_share_percent']:.0f} % of the mean "
        f"score; mean cosine {figures['resonance_cosine']:.3f}",
        f"NaN rows {figures['nan_row_percent']:.3g} %; sinks hold {figures['sink_mass_percent']:.3g} % of the mass",
    ]
    if "underflow_percent" in figures:
        found.append(
            f"P underflow: {figures['underflow_percent']:.3g} % of pairs, mass lost "
            f"{figures['zeroed_mass_percent']:.3g} % (P-Cast's product says "
            f"{figures['product_mass_percent']:.3g} %); cut to the largest value: "
            f"{figures['saturated_count']:,.0f}"
        )
    return found


def _error(bits: NumericRecord) -> str:
    """Return the errors; of an output with NaN or Inf there are none."""
    if bits.nan_count or bits.inf_count:
        return (
            f"not finite: {whole(bits.nan_count)} NaN in the output "
            f"({percent(bits.nan_row_fraction)} of rows), {whole(bits.inf_count)} Inf"
        )
    ulp = "-" if bits.max_ulp is None else whole(bits.max_ulp)
    return f"relative RMSE {_figure(bits.rmse)}   max |error| {_figure(bits.max_abs_error)}   max ULP {ulp}"


def _finite(record: RunRecord, bits: NumericRecord) -> list[Cell]:
    """Return what is finite on the same sample where the output is not."""
    is_node = record.timing is not None and record.timing.overlap is not None
    if is_node or not (bits.nan_count or bits.inf_count):
        return []  # presets of a node are formats of sums: none was tried
    found = [f"{f.schedule} with precision {f.precision} (relative RMSE {f.rmse:.2e})" for f in record.finite]
    if found:
        return [Cell(f"finite on the same sample: {', '.join(found)}", "good")]
    return [Cell("no preset of this device's schedules is finite on the same sample", "bad")]


def _spread(found: Spread) -> str:
    if found.differing is None:
        return f"with {found.arithmetic}: outputs are not finite"
    if not found.differing:
        return f"with {found.arithmetic} the same bits"
    return f"with {found.arithmetic} {percent(found.differing)} of outputs differ, relative RMSE {_figure(found.rmse)}"


def _constants(timing: TimingRecord) -> list[Fact]:
    shares = basis_shares(timing)
    if not shares:
        return []
    text = ", ".join(f"{basis} {percent(share)}" for basis, share in shares.items())
    rows = [Cell(f"{text} of busy cycles")]
    total = sum(c.cycles for c in timing.constants)
    weak = [c for c in timing.constants if c.basis in _WEAK_BASES][:_NAMED_CONSTANTS]
    rows += [Cell(f"{c.basis}: {c.key}, {percent(c.cycles / total)}", "dim") for c in weak]
    return [("constants", tuple(rows))]


def _presets(record: RunRecord) -> list[Fact]:
    """Return what the schedule's other presets gave on the same rows."""
    rows = []
    for p in record.presets:
        error = "not finite" if p.relative_rmse is None else f"relative RMSE {_figure(p.relative_rmse)}"
        time = "" if p.latency_us is None else f", {format_duration(p.latency_us * 1e-6)}"
        rows.append(Cell(f"{p.precision}: {error}{time}"))
    return [("presets", tuple(rows))] if rows else []


def _notes(record: RunRecord) -> list[Fact]:
    """Return the run's notes, without what the line on arithmetic says already."""
    bits = record.numerics
    said = () if bits is None else (*bits.arithmetic, "order of row sums")
    notes = [note for note in record.notes if not any(name in note for name in said)]
    return [("notes", tuple(Cell(note, "warn") for note in notes))] if notes else []


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.2e}"
