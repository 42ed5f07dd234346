"""Sections on whole models: predicted and printed gains, bits of a real layer, memory, the host, layer times."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Any

import npusim
from npusim.config.cases import load_measurements
from npusim.config.layers import ModelProblem
from npusim.config.load import load_workload
from npusim.config.node_file import load_node_device
from npusim.machines.node.layers_in_memory import longest, memory_plan
from npusim.machines.node.node_result import NodeTiming
from npusim.program.timing.timing_result import TimingResult
from npusim.simulation.plan import layer_problem
from npusim.studies.validate.measured_times import Predictor, validate_times
from reports.nodes import study
from reports.parts.document import Section, number, percent, table
from reports.parts.kernel import declared_tiling

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from npusim.config.cases import MeasurementCase
    from npusim.config.node_file import NodeDevice
    from npusim.studies.validate.measured_times import TimesReport

__all__ = [
    "attention_bits",
    "figure_11",
    "gains",
    "host",
    "layer_counts",
    "models",
    "rank_correlation",
    "table_6",
    "whole_models",
]

HERE = Path(__file__).parent
KIB, GIB = 1 << 10, 1 << 30
#: Real Q, K and V: one group of three query heads, a rank each, with a drawn W_o.
TENSORS, PREFIX, RANKS, HEADS = "smollm2_layer18_group.safetensors", "layer18", 3, "smollm2"
NAMES = ("llama2_7b", "llama_65b", "llama2_70b", "opt_30b", "pangu_38b")
LENGTHS = (4 * KIB, 32 * KIB, 256 * KIB)
V100S = "v100_x8"
#: Memory of the two V100 there are.
CAPACITIES = (16 * GIB, 32 * GIB)


# ---------------------------------------------------------------- gains


def rank_correlation(some: Sequence[float], others: Sequence[float]) -> float:
    """Return Spearman's rank correlation; equal values share their mean rank."""

    def ranks(values: Sequence[float]) -> list[float]:
        ordered = sorted(values)
        return [ordered.index(v) + (ordered.count(v) - 1) / 2 for v in values]

    a, b = ranks(some), ranks(others)
    x, y = mean(a), mean(b)
    top = sum((i - x) * (j - y) for i, j in zip(a, b, strict=True))
    spread = sum((i - x) ** 2 for i in a) * sum((j - y) ** 2 for j in b)
    return top / spread**0.5 if spread else 0.0


def gains() -> Section:
    """Predicted and printed gains of tiling-AllReduce in per cent, and their values with another constant."""
    rows, data, printed, ours = [], {}, [], []
    for r in validate_times(HERE / "measured_papers.yaml", only="tiling_allreduce", method=study.METHOD).residuals:
        low, high = r.measured
        if r.quantity != "speedup" or "standard" in r.name:
            continue
        gain, said = (r.predicted - 1) * 100, f"{(low - 1) * 100:.1f}"
        said += "" if low == high else f" to {(high - 1) * 100:.1f}"
        rows.append([f"`{r.name}`", said, f"{gain:.1f}", f"{gain - (low + high) * 50 + 100:+.1f}"])
        data[r.name] = {"printed": [low, high], "predicted": r.predicted}
        if low == high:
            printed.append((low - 1) * 100)
            ours.append(gain)
    constant = median(printed)
    own = mean(abs(a - b) for a, b in zip(printed, ours, strict=True))
    other = mean(abs(a - constant) for a in printed)
    rank = rank_correlation(printed, ours)
    fields: dict[str, object] = {
        "gains": table(["case", "printed %", "predicted %", "difference in points"], rows),
        "gain_rank": number(rank, 2),
        "gain_rows": len(printed),
        "gain_error": f"{own:.1f}",
        "gain_constant": f"{constant:.1f}",
        "gain_constant_error": f"{other:.1f}",
    }
    return fields, {"gains": {**data, "rank_correlation": rank, "error": own, "error_of_a_constant": other}}


# ---------------------------------------------------------------- bits


def attention_bits() -> Section:
    """Real attention times a drawn W_o on three ranks: error, and what other orders change."""
    rows, data = [], {}
    for fmt in ("float16", "float32"):
        for blocks in (1, 4):
            result = npusim.run(
                "tiling_allreduce",
                hw="ascend_910b2_x8",
                workload=HEADS,
                tensors=TENSORS,
                tensor_prefix=PREFIX,
                tensor_parallel=RANKS,
                rows="all",
                precision=fmt,
                tiling={"blocks": blocks},
                trace_groups=(),
            )
            assert result.numerics is not None
            bits = result.numerics
            rows += [
                [fmt, blocks, bits.error.rmse, o.arithmetic, percent(o.differing or 0.0), o.rmse] for o in result.orders
            ]
            overflow = sum(bits.overflow_counts.values())
            data[f"{fmt} {blocks}"] = {
                "rmse": bits.error.rmse,
                "overflow": overflow,
                "orders": {o.arithmetic: [o.differing, o.rmse] for o in result.orders},
            }
    header = ["sums in", "blocks", "relative RMSE", "against", "outputs that differ", "RMSE between"]
    return {"real_bits": table(header, rows), "real_ranks": RANKS}, {"real_bits": data}


# ---------------------------------------------------------------- memory


@cache
def _machine(capacity: int) -> NodeDevice:
    return load_node_device(V100S, {"memory.gm.capacity_bytes": str(capacity)})


def models() -> dict[str, ModelProblem]:
    """Return the models of the paper's Table 1 on eight V100; PanGu-38B by its shapes and as stated."""
    found = {}
    for name in NAMES:
        load = load_workload(name)
        ranks = _machine(CAPACITIES[0]).node.device_count.value
        model = layer_problem(load, load.problem(seq=LENGTHS[0], tensor_parallel=ranks), ranks, ModelProblem)
        assert isinstance(model, ModelProblem)
        found[name] = model
    found["pangu_38b, 12.6 B by its shapes"] = found["pangu_38b"].model_copy(update={"parameters": 0})
    return found


def layer_counts() -> Section:
    """L_GPU by both formulas, and where the printed one cannot hold."""
    rows, data = [], {}
    for name, model in models().items():
        for capacity in CAPACITIES:
            for tokens in LENGTHS:
                p = model.model_copy(update={"seq_q": tokens, "seq_kv": tokens})
                printed, found = paper_layers(p, capacity), memory_plan(p, _machine(capacity))
                why = _cannot(p, printed, found.free_bytes)
                own = str(found.gpu_layers) if found.free_bytes >= 0 else "does not fit"
                rows.append([name, capacity // GIB, tokens // KIB, f"{printed:.1f}", own, p.layers, why])
                data[f"{name} {capacity // GIB} {tokens}"] = {"printed": printed, "corrected": found.gpu_layers}
    ends = []
    for name, model in models().items():
        for capacity in CAPACITIES:
            alone, with_host = (longest(model, _machine(capacity), is_offloaded=way) for way in (False, True))
            ends.append([name, capacity // GIB, f"{alone // KIB:,}", f"{with_host // KIB:,}"])
            data[f"{name} {capacity // GIB} longest"] = {"devices": alone, "offloaded": with_host}
    header = ["model", "GiB", "K tokens", "L_GPU printed", "corrected", "layers", "printed cannot hold"]
    cpu = _machine(CAPACITIES[0]).node.cpu
    assert cpu is not None
    budget = (cpu.dram_capacity_bytes.value - cpu.reserve_bytes.value) // GIB
    fields: dict[str, object] = {
        "layer_counts": table(header, rows),
        "host_budget": budget,
        "longest": table(["model", "GiB", "K tokens on the GPUs", "K tokens with the host"], ends),
    }
    return fields, {"layer_counts": data}


def paper_layers(p: ModelProblem, capacity_bytes: int) -> float:
    """Return L_GPU by equation 37 as printed: a real number, of any sign, beyond the layers there are too."""
    n, h1, h2 = p.ranks, p.hidden, p.intermediate
    weights, s = p.layers * (8 * h1 * h1 + 4 * h1 * h2), p.seq_kv
    free_bytes = n * capacity_bytes - weights - 6 * p.batch * s * h1 - n * p.vocab * h1
    return free_bytes / (4 * p.batch * h1 * s)


def _cannot(p: ModelProblem, printed: float, free: int) -> str:
    found = []
    if printed > p.layers:
        found.append("more than there are")
    if printed < 0:
        found.append("negative")
    if printed >= 0 > free:
        found.append("nothing is left")
    if p.gated:
        found.append("FFN has a third matrix")
    if p.group_size > 1:
        found.append("grouped heads")
    return ", ".join(found)


# ---------------------------------------------------------------- the host, and whole models


def host() -> Section:
    """Table 3, and npusim's attention kernel compared with the paper's."""
    report = validate_times(HERE / "measured_offload.yaml", band=0.1)
    rows = [
        [
            f"`{r.name}`",
            r.quantity,
            number(r.measured.low, 4),
            number(r.predicted, 4),
            percent(r.relative_error, sign="+"),
        ]
        for r in report.residuals
    ]
    fields: dict[str, object] = {
        "table_3": table(["case", "quantity", "measured", "predicted", "error"], rows),
        "table_3_median": percent(report.median_abs_error),
        "table_3_worst": percent(report.worst_abs_error),
        "our_decode": _our_decode(),
        "table_3_speedups": _speedups(report),
        "pcie": f"{_machine(CAPACITIES[0]).node.device_count.value * _pcie() / 1e9:.0f}",
        "dram": f"{_dram() / 1e9:.0f}",
    }
    return fields, {"table_3": {f"{r.name} {r.quantity}": r.predicted for r in report.residuals}}


def _pcie() -> float:
    pcie = _machine(CAPACITIES[0]).node.pcie
    assert pcie is not None
    return float(pcie.bytes_per_s.value)


def _dram() -> float:
    cpu = _machine(CAPACITIES[0]).node.cpu
    assert cpu is not None
    return float(cpu.dram_bytes_per_s.value)


def _speedups(report: TimesReport) -> str:
    found = [r.predicted for r in report.residuals if r.quantity == "speedup"]
    return f"{min(found):.2f} to {max(found):.2f}"


def _our_decode() -> str:
    """Return the paper's kernel, as stated in the node's file, and our split_kv on one V100."""
    predictor, rows = Predictor(), []
    for case in load_measurements(HERE / "measured_offload.yaml").cases:
        if case.schedule != "offload_classic":
            continue
        own = predictor.quantity(_with(case, "split_kv"), "gpu_us")
        size = case.workload.problem().kv_bytes()
        stated, paper = (case.measured.gpu_us or (0.0, 0.0))[0], predictor.quantity(case, "gpu_us")
        keys = (case.workload.seq_kv or 0) // KIB
        rows.append([keys, number(stated, 4), number(paper, 4), number(own, 4), f"{size / own / 1e3:.0f}"])
    return table(["K keys", "measured us", "fitted kernel us", "split_kv us", "its GB/s"], rows)


def _with(case: MeasurementCase, attention: str) -> MeasurementCase:
    return case.model_copy(update={"attention": attention})


def whole_models() -> Section:
    """Tables 4 to 6: predicted times of layers, and the rest, which is the framework's overhead."""
    predictor, rows, data = Predictor(), [], {}
    for case in load_measurements(HERE / "measured_models.yaml").cases:
        result = predictor.result(case)
        assert isinstance(result.problem, ModelProblem)
        rate, latency = case.measured.tokens_per_s, case.measured.latency_us
        said = latency[0] / 1e3 if latency else result.problem.batch * 1e3 / (rate or (1.0, 1.0))[0]
        own = result.latency_us / 1e3
        rest = (said - own) * 1e3 / result.problem.layers
        rows.append([f"`{case.name}`", number(said, 4), number(own, 4), percent((said - own) / said, 0), f"{rest:.0f}"])
        data[case.name] = {"measured_ms": said, "predicted_ms": own, "rest_us_a_layer": rest}
    wide = _as_stated()
    header = ["case", "measured ms", "our layers ms", "left over", "left over, us a layer"]
    fields: dict[str, object] = {
        "whole_models": table(header, rows),
        "stated_38b": wide[0],
        "npu_kernels": _share(data, "pangu_38b"),
        "gpu_kernels": _share(data, "opt_30b", "llama_65b"),
    }
    return fields, {"whole_models": data, "pangu_38b_as_stated": wide[1]}


#: Table 6: a 910B, LLaMA2-7B, prompts of 512; its attention as measured over standard attention, by batch.
TABLE_6 = {1: (56.97, 11.03), 8: (436.1, 91.61), 16: (746.3, 158.3)}
#: Attention of a decoding step: one kernel, the same whose blocks overlap, and kernels an operator.
DECODED = (
    "split_kv",
    "split_kv:pipeline=core",
    "standard",
    "standard:operators=eager",
    "standard:operators=eager_float32",
)
TABLE_6_HW, TABLE_6_MODEL, PROMPT = "ascend_910b2", "llama2_7b", 512


def table_6() -> Section:
    """A decoding step by its kind of attention, and the reason why one kernel of one query is no faster than four."""
    rows, data = list[list[object]](), dict[str, dict[str, float]]()
    for batch, (fast, standard) in TABLE_6.items():
        for name in DECODED:
            result = npusim.run(
                "layer",
                hw=TABLE_6_HW,
                workload=TABLE_6_MODEL,
                seq=PROMPT,
                phase="decode",
                batch=batch,
                tiling={"attention": name},
                numerics=False,
                trace_groups=(),
            )
            assert isinstance(result.timing, NodeTiming)
            layers = load_workload(TABLE_6_MODEL).layers or 1
            us = result.timing.parts_s["attention"] / layers * 1e6
            data[f"{batch} {name}"] = {"attention_us": us, "step_ms": result.latency_us / 1e3}
        step = {name: data[f"{batch} {name}"]["step_ms"] for name in DECODED}
        rows += [
            [batch, f"`{name}`", data[f"{batch} {name}"]["attention_us"], ms, ms / min(step.values())]
            for name, ms in step.items()
        ]
        rows.append([batch, "printed", "", "", fast / standard])
    header = ["batch", "attention", "us a layer", "ms a step", "over the fastest here"]
    fields: dict[str, object] = {"table_6": table(header, rows), "prompt": PROMPT, **_idle(max(TABLE_6))}
    return fields, {"table_6": data}


def _idle(batch: int) -> dict[str, object]:
    """Return the cause of the waits of split_kv's loads: blocks of one or two tiles that end one by one, or overlap."""
    problem = (
        load_workload(TABLE_6_MODEL)
        .problem(seq=PROMPT, batch=batch)
        .model_copy(update={"seq_q": 1, "causal_offset": PROMPT - 1})
    )
    found: dict[str, object] = {"decoded_blocks": problem.batch * problem.heads}
    for name, fields in (("block", {}), ("core", {"pipeline": "core"})):
        tiling = declared_tiling("split_kv", TABLE_6_HW, **fields)
        result = npusim.run("split_kv", hw=TABLE_6_HW, problem=problem, tiling=tiling, numerics=False, trace_groups=())
        assert isinstance(result.timing, TimingResult)
        loads = next(u for u in result.timing.queues[0] if u.queue == "aic.MTE2")
        found[f"{name}_us"] = number(result.device.seconds(result.cycles) * 1e6)
        found[f"{name}_busy"] = percent(loads.busy_cycles / result.cycles, 0)
        found["decoding_cores"] = len(result.timing.queues)
    return found


#: Figure 11 in words (section 5.3): FasterTransformer with FastAttention over it without, at most.
FIGURE_11, FIGURE_11_MODEL = 1.46, "pangu_38b"


def figure_11() -> Section:
    """The first token of a model on eight V100, with a fused kernel and with unfused attention."""
    ways = {"fused": "volta_flash", "eager": "standard:operators=eager", "float32": "standard:operators=eager_float32"}
    rows, data = [], dict[str, Any]()
    for tokens in (KIB, 2 * KIB, 4 * KIB, 8 * KIB, 16 * KIB):
        ms = {
            name: npusim.run(
                "layer",
                hw=V100S,
                workload=FIGURE_11_MODEL,
                seq=tokens,
                tiling={"attention": attention},
                numerics=False,
                trace_groups=(),
            ).latency_us
            / 1e3
            for name, attention in ways.items()
        }
        gains = [ms[name] / ms["fused"] for name in ("eager", "float32")]
        rows.append([tokens // KIB, *(number(x, 4) for x in ms.values()), *gains])
        data[str(tokens)] = {**ms, "gains": gains}
    header = ["K tokens", "fused, ms", "eager, ms", "eager_float32, ms", "eager over fused", "eager_float32"]
    eager, wide = ([found["gains"][i] for found in data.values()] for i in (0, 1))
    fields: dict[str, object] = {
        "figure_11": table(header, rows),
        "figure_11_paper": FIGURE_11,
        "figure_11_eager": f"{number(min(eager))} to {number(max(eager))}",
        "figure_11_float32": f"{number(min(wide))} to {number(max(wide))}",
    }
    return fields, {"figure_11": data}


def _share(data: Mapping[str, Mapping[str, float]], *models: str) -> str:
    """Return the kernels' share of the measured times, over the cases of some models."""
    shares = [of["predicted_ms"] / of["measured_ms"] for name, of in data.items() if name.startswith(models)]
    return f"{100 * min(shares):.0f} to {percent(max(shares), 0)}"


def _as_stated() -> tuple[str, dict[str, float]]:
    """Return PanGu-38B with an FFN so wide that its layers have the 38 B parameters stated."""
    load = load_workload("pangu_38b")
    hidden, layers = load.hidden or 1, load.layers or 1
    width = (load.parameters or 0) / layers / (2 * hidden) - 2 * hidden
    wide = load.model_copy(update={"intermediate": round(width / 128) * 128})
    rows, data = [], {}
    for tokens in (4 * KIB, 8 * KIB, 32 * KIB):
        times = []
        for phase, blocks in (("prefill", 4), ("decode", 1)):
            result = npusim.run(
                "layer",
                hw="ascend_910b2_x8",
                workload=wide,
                seq=tokens,
                phase=phase,  # type: ignore[arg-type]
                tiling={"blocks": blocks},
                numerics=False,
                trace_groups=(),
            )
            times.append(result.latency_us / 1e3)
        rows.append([tokens // KIB, number(times[0], 4), number(1e3 / times[1], 4)])
        data[str(tokens)] = times[0]
    return table(["K tokens", "prefill ms", "tokens a second"], rows), data
