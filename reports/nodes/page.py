"""Page: eight NPUs and two GPUs, when tiling-AllReduce pays and when it does not."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from npusim.config.cases import load_measurements
from npusim.config.node_file import load_node, load_node_device
from npusim.machines.node.node_result import NodeTiming
from npusim.studies.validate.measured_times import validate_times
from reports.nodes import models, study
from reports.parts.chart import Bar, Panel, chart, gantt
from reports.parts.document import Section, gather, number, percent, save_page, table
from reports.validation.study import wrong_signs

if TYPE_CHECKING:
    from npusim.simulation.run_result import RunData
    from npusim.studies.validate.measured_times import Residual, TimesReport

__all__ = ["write"]

HERE = Path(__file__).parent
NPUS, GPUS = "ascend_910b2_x8", "h200_x2"
TOKENS, BLOCKS = 8192, 4
#: Node, its driver, and how the page calls them.
WAYS = ((NPUS, "sdma", "eight 910B, SDMA"), (NPUS, "aiv", "eight 910B, vector cores"), (GPUS, "sm", "two H200, SMs"))
LENGTHS = (2048, TOKENS, 32768)
COUNTS = (1, 2, 4, 8)
#: Block counts that are searched with unequal first blocks.
FEW = (2, 4)
#: Shares of the rows in the first block that are searched; an equal share is one of them.
FIRST_SHARES = (0.1, 0.3, 0.5)
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
#: Files of what was measured, and their titles; the bits are those of `measurements/`.
MEASURED = (
    ("residuals_papers", "measured_papers.yaml"),
    ("residuals_npu", "measured_ascend_910b2.yaml"),
    ("residuals_gpu", "measured_h200.yaml"),
)
RANKS = 8
FORMATS = ("float16", "bfloat16", "float32")
MESSAGES, SERVERS = (MIB, 64 * MIB, GIB), (1, 8, 64, 512)


def write(folder: Path) -> list[Path]:
    """Write ``nodes.md``, its data, its timelines and its chart to ``folder``."""
    parts = (
        _outcomes,
        _blocks,
        _forms,
        _residuals,
        _sums,
        _cluster,
        models.gains,
        models.attention_bits,
        models.layer_counts,
        models.host,
        models.whole_models,
        models.table_6,
        models.figure_11,
    )
    content = gather("nodes", (part() for part in parts), tokens=TOKENS, blocks=BLOCKS, ranks=RANKS)
    speedups = {name: list(zip(COUNTS, values, strict=True)) for name, values in _speedups().items()}
    title = f"Speed-up over one block, {TOKENS} tokens"
    charts = {
        "nodes_timelines.svg": _timelines(),
        "nodes_blocks.svg": chart(title, "row blocks", "untiled / tiled", speedups),
    }
    return save_page(folder, "nodes", content, charts)


def _outcomes() -> Section:
    """What tiling changes, cause by cause, on short and long sequences."""
    rows, data = [], {}
    for node, driver, name in WAYS:
        for tokens in LENGTHS:
            found = study.change(node, tokens, driver, BLOCKS)
            causes = [f"{c:+.0f}" if abs(c) >= 0.5 else "0" for c in found[1:4]]
            rows.append(
                [
                    name,
                    tokens,
                    number(found.untiled, 4),
                    *causes,
                    number(found.tiled, 4),
                    found.speedup,
                    percent(found.efficiency, 0),
                ]
            )
            data[f"{name} {tokens}"] = {**found._asdict(), "speedup": found.speedup}
    header = ["", "tokens", "untiled", "cutting", "sharing", "exposed", "tiled", "speed-up", "overlap"]
    fields: dict[str, object] = {"outcomes": table(header, rows)}
    for key, (node, driver, _) in zip(("npu", "cores", "gpu"), WAYS, strict=True):
        speedups = [study.change(node, tokens, driver, BLOCKS).speedup for tokens in LENGTHS]
        fields[key] = f"{number(min(speedups))} to {number(max(speedups))}"
        parts = study.tiled(node, TOKENS, driver, 1).timing
        assert isinstance(parts, NodeTiming)
        fields[f"{key}_share"] = percent(parts.allreduce_s / parts.latency_s, 0)
    return fields, {"outcomes": data}


def _timelines() -> str:
    panels = []
    for node, driver, name in (WAYS[0], WAYS[2]):
        runs = {
            "not tiled" if blocks == 1 else f"{blocks} blocks": _tracks(study.tiled(node, TOKENS, driver, blocks))
            for blocks in (1, BLOCKS)
        }
        mask = "causal" if node in study.CAUSAL else "no mask"
        panels.append(Panel(f"{name} ({mask})", runs))
    title = f"Device 0, PanGu-38B, {TOKENS} tokens: A attention, L linear layer, R all-reduce"
    return gantt(title, panels, ("attention", "linear", "allreduce"))


def _tracks(result: RunData) -> dict[str, list[Bar]]:
    """Return the spans of device 0 by track."""
    assert result.timing is not None
    us = 1e6 / result.timing.clock_hz
    tracks: dict[str, list[Bar]] = {q.name.rpartition(".")[2]: [] for q in result.program.queues}
    for span in result.timing.spans:
        kind, _, index = span.label.partition(" ")
        letter = {"attention": "A", "linear": "L"}.get(kind, "R")
        bar = Bar(kind, f"{letter}{index}", span.start * us, span.end * us)
        tracks[span.queue.rpartition(".")[2]].append(bar)
    return tracks


def _speedups() -> dict[str, list[float]]:
    """Return the speed-up of each number of blocks, predicted and, for the GPUs, measured."""
    found = {name: [study.change(node, TOKENS, driver, n).speedup for n in COUNTS] for node, driver, name in WAYS}
    cases = {case.name: case for case in load_measurements(HERE / "measured_h200.yaml").cases}
    stem = f"h200x2_attn_linear_allreduce_s{TOKENS}_"
    names = ["sequential", *(f"tiled{n}" for n in COUNTS[1:])]
    times = [dict(cases[stem + name].measured.items())["latency_us"].low for name in names]
    return {**found, "two H200, measured": [times[0] / t for t in times]}


def _blocks() -> Section:
    """Number of blocks, and the best of a search over it and the first block's share."""
    speedups = _speedups()
    rows = [[name, *values] for name, values in speedups.items()]
    header = ["", *(f"{n} blocks" if n > 1 else "1 block" for n in COUNTS)]
    best, data = [], {}
    for tokens in LENGTHS:
        found = study.search(NPUS, tokens, COUNTS, FEW, FIRST_SHARES)
        top, equal, plain = found.best, found.best_equal, found.untiled_us
        rest = [number(plain / us) for us in (equal[0], top[0])]
        best.append([tokens, equal[1], rest[0], top[1], top[2], rest[1]])
        data[str(tokens)] = {"untiled_us": plain, "best": top, "best_equal": equal}
    titles = ["tokens", "blocks, equal", "speed-up", "blocks", "first share", "speed-up"]
    shares = ", ".join(map(str, FIRST_SHARES))
    return (
        {"speedups": table(header, rows), "search": table(titles, best), "shares": shares},
        {"speedups": speedups, "search": data},
    )


def _forms() -> Section:
    """Alpha, beta and protocol steps."""
    rows, data = [], {}
    for node in (NPUS, GPUS):
        for way in study.forms(node):
            alpha, rate = way.form.alpha_s * 1e6, way.form.bytes_per_s / 1e9
            rows.append([f"`{node}`", way.driver, way.mode, way.algorithm, way.rounds, alpha, rate])
            data[f"{node} {way.driver} {way.mode} {way.algorithm}"] = {
                "rounds": way.rounds,
                "alpha_us": alpha,
                "gigabytes_per_s": rate,
            }
    header = ["node", "driver", "mode", "order", "rounds", "alpha us", "1/beta GB/s"]
    sizes = [KIB * (1 << i) for i in range(20)]
    steps = study.step(GPUS, "sm", sizes)
    told = ", ".join(f"`{mode}` from {size // KIB} KiB" for size, mode in steps[1:])
    fields: dict[str, object] = {"forms": table(header, rows), "first_mode": steps[0][1]}
    return {**fields, "steps": told, **_constants()}, {
        "alpha_beta": data,
        "protocol_steps": {mode: size for size, mode in steps},
    }


def _constants() -> dict[str, object]:
    """Return figures of the text on the node files: fitted constants and their sources, used cores, and issue."""
    npus, gpus = load_node(NPUS), load_node_device(GPUS)
    fitted = {c for _, fact in gpus.node.facts() if fact.basis == "fitted" for c in fact.fitted_on or ()}
    driver, host = gpus.node.drivers["sm"], gpus.node.host
    assert host is not None
    assert npus.between is not None
    return {
        "fitted_sizes": sum("h200x2_allreduce" in case for case in fitted),
        "fitted_layers": ", ".join(f"`{c}`" for c in sorted(fitted) if "linear" in c),
        "taken": driver.engine_count.value,
        "multiprocessors": gpus.each.core_count("sm"),
        "issue_us": host.collective_issue_s.value * 1e6,
        "between": npus.between.bytes_per_s.value / 1e9,
    }


def _residuals() -> Section:
    fields: dict[str, object] = {}
    data: dict[str, object] = {}
    worst = {}
    for key, name in MEASURED:
        report = validate_times(HERE / name, method=study.METHOD)
        fields[key] = _residual_table(report)
        fields[f"{key}_median"] = percent(report.median_abs_error)
        fields[f"{key}_worst"] = percent(report.worst_abs_error)
        worst[key] = {"median": report.median_abs_error, "worst": report.worst_abs_error}
        data[key] = {f"{r.name} {r.quantity}": r.predicted for r in report.residuals}
        if key == "residuals_gpu":
            fields["gpu_wrong"] = ", ".join(f"`{name}`" for name in wrong_signs(report.residuals)) or "none"
    return fields, {"predicted": data, "errors": worst}


def _residual_table(report: TimesReport) -> str:
    rows = [
        [f"`{r.name}`", r.quantity, _measured(r), number(r.predicted, 4), percent(r.relative_error, sign="+")]
        for r in report.residuals
    ]
    return table(["case", "quantity", "measured", "predicted", "error"], rows)


def _measured(residual: Residual) -> str:
    low, high = residual.measured
    return number(low, 4) if low == high else f"{number(low)} to {number(high)}"


def _sums() -> Section:
    rows, data = [], {}
    for fmt in FORMATS:
        for way in study.sums(fmt, RANKS):
            shares = [percent(way.differs_from_ring), percent(way.differs_tiled)]
            rows.append([fmt, way.name, way.rmse, way.max_abs, *shares])
            data[f"{fmt} {way.name}"] = way._asdict()
    header = ["format", "order", "RMSE", "max error", "other bits than ring", "tiled / whole"]
    return {"sums": table(header, rows), "elements": study.ROWS * study.COLUMNS}, {"sums": data}


def _cluster() -> Section:
    rows, data = [], {}
    note = ""
    for size in MESSAGES:
        runs = [study.cluster(size, servers) for servers in SERVERS]
        rows.append([f"{size // MIB} MiB", *(number(r.latency_us, 4) for r in runs)])
        data[str(size)] = {str(s): r.latency_us for s, r in zip(SERVERS, runs, strict=True)}
        note = next(n for n in runs[-1].notes if "devices:" in n)
    header = ["message a device", *(f"{RANKS * s:,} NPUs us" for s in SERVERS)]
    return {"cluster": table(header, rows), "assumption": note}, {"cluster_us": data}
