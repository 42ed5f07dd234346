"""Comparisons like with like on a 910B: PASA, FastAttention over unfused attention, operators of a framework."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from npusim.config.cases import load_measurements
from npusim.config.load import load_workload
from npusim.config.problem import LayerProblem, Problem
from npusim.program.timing.timing_result import TimingResult
from npusim.run import run
from npusim.simulation.simulate import simulate_program
from npusim.studies.validate.measured_times import Predictor
from reports.parts.kernel import declared_tiling

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from npusim.run import RunResult

__all__ = [
    "TABLE_7",
    "TABLE_9",
    "UNFUSED",
    "Beside",
    "Deit",
    "Layer",
    "Native",
    "Operator",
    "asked_of_host",
    "by_run",
    "deit",
    "deit_operators",
    "half_reductions",
    "in_blocks",
    "int8",
    "layer",
    "native",
    "pasa",
    "shares",
    "wide",
]

DEVICE = "ascend_910b2"
NODES = Path(__file__).resolve().parent.parent / "nodes"
#: The vendor's kernels in CANN: FP32 128 x 512 in slices of 8 rows, FP16 128 x 1024 in slices of 16
#: (ops-transformer attention/prompt_flash_attention, CVDIFF).
CANN_FP32: dict[str, Any] = {"block_q": 128, "block_kv": 512, "vector_rows": 8, "kernel": "cann"}
CANN_FP16: dict[str, Any] = {"block_q": 128, "block_kv": 1024, "vector_rows": 16, "kernel": "cann"}


def _run(
    schedule: str,
    problem: Problem,
    precision: str | None = None,
    overrides: Mapping[str, str] | None = None,
    **tiling: Any,
) -> RunResult:
    return run(
        schedule,
        hw=DEVICE,
        problem=problem,
        precision=precision,
        tiling=declared_tiling(schedule, DEVICE, **tiling),
        numerics=False,
        trace_groups=(),
        overrides=overrides,
    )


def _us(schedule: str, problem: Problem, precision: str | None = None, **given: Any) -> float:
    return _run(schedule, problem, precision, **given).latency_us


def attention(seq: int, heads: int, *, causal: bool, batch: int = 1, head_dim: int = 128) -> Problem:
    """Return one device's attention."""
    return Problem(batch=batch, heads=heads, seq_q=seq, seq_kv=seq, head_dim=head_dim, causal=causal)


class Beside(NamedTuple):
    """A kernel compared with CANN's FP32 kernel and with npusim's fastest one: ratios of times, and TFLOP/s."""

    over_cann: float
    over_best: float
    rate: float


def pasa(seq: int = 32768) -> dict[str, Beside]:
    """Return PASA by precision, with the declared tile and with the tile that a run chooses, and the FP32 kernels.

    "Ours" is `flash` with the kernel and the tile that a run chooses by simulation.
    """
    problem = attention(seq, 16, causal=False)
    times = {
        "CANN FP32": _us("flash", problem, "fa2_fp32", **CANN_FP32),
        "our FP32 flash, tile by a run": _chosen("flash", problem, "fa2_fp32"),
    }
    base, best = times.values()
    for name in ("fp16_mean", "fp32_mean", "fixed_reference", "fp16_mean,sum_order=tree_halves"):
        times[name] = _us("pasa", problem, name)
    times["fp16_mean, tile by a run"] = _chosen("pasa", problem, "fp16_mean")
    flops = problem.dense_flops() / 1e6
    return {name: Beside(base / us, best / us, flops / us) for name, us in times.items()}


def _chosen(schedule: str, problem: Problem, precision: str | None = None) -> float:
    """Return the latency with the tile that a run chooses."""
    return run(schedule, hw=DEVICE, problem=problem, precision=precision, numerics=False, trace_groups=()).latency_us


def half_reductions() -> dict[str, float]:
    """Return PASA over CANN's FP32 kernel if a block reduction of float16 cost its documented 7 cycles a repeat."""
    problem = attention(32768, 16, causal=False)
    base = _us("flash", problem, "fa2_fp32", **CANN_FP32)
    key = "cores.aiv.engines.VECTOR.ops.block_reduce.slope_cycles_per_repeat"
    return {name: base / _us("pasa", problem, name, overrides={key: "7"}) for name in ("fp16_mean", "fp32_mean")}


def wide() -> float:
    """Return CANN's FP16 kernel over its FP32 kernel, with the tiles of each."""
    problem = attention(32768, 16, causal=False)
    return _us("flash", problem, "fa2_fp32", **CANN_FP32) / _us("flash", problem, "fa16", **CANN_FP16)


def by_run() -> dict[str, tuple[float, ...]]:
    """Return the papers' ratios with tiles that runs choose: FP16 over FP32, PASA, two-level over unified tiling."""
    problem = attention(32768, 16, causal=False)
    precisions = ("fa2_fp32", "fa16_32", "fa16")
    wide, mixed, half = (_chosen("flash", problem, name) for name in precisions)
    shapes = [attention(seq, heads, causal=True) for heads in (5, 4) for seq in (4096, 8192, 16384)]
    levels = [_chosen("unified", shape) / _chosen("two_level", shape) for shape in shapes]
    return {"half": (wide / mixed, wide / half), "levels": (min(levels), max(levels))}


#: Tokens of figure 10 whose gains section 5.2.2 prints for PanGu-71B, and blocks of rows, which it does not state.
FIGURE_10 = (2, 8, 32)
BLOCKS = (2, 4)


def in_blocks() -> dict[str, tuple[float, ...]]:
    """Return the gains of figure 10, in per cent, as printed and by the number of blocks of rows."""
    predict, found = Predictor(), {}
    cases = {case.name: case for case in load_measurements(NODES / "measured_papers.yaml").cases}
    for thousands in FIGURE_10:
        case = cases[f"tiling_allreduce_71b_{thousands}k"]
        cut = [predict.quantity(case.model_copy(update={"tiling": {"blocks": n}}), "speedup") for n in BLOCKS]
        assert case.measured.speedup is not None
        found[f"{thousands}K"] = tuple((gain - 1) * 100 for gain in (case.measured.speedup.low, *cut))
    return found


#: FastAttention, Table 9: PanGu-71B, four heads a device, microseconds in FP16 and naive INT8.
TABLE_9 = {
    128: (55.01, 42.77),
    256: (58.84, 50.99),
    512: (56.65, 57.4),
    1024: (77.77, 62.36),
    2048: (113.49, 93.43),
    4096: (279.94, 222.325),
}
#: The least call of Table 9's FP16 rows, as filed with its cases: what the host takes of each.
HOST_US = 52.0


def int8(seq: int) -> tuple[float, ...]:
    """Return a call of Table 9 in us: in FP16, with products at INT8's rate, and with softmax in float16 as well.

    No program multiplies INT8 here: the second and third are what-ifs of the same program.
    """
    problem, key = attention(seq, 4, causal=False), "cores.aic.engines.CUBE.fractals.float16.k_elements"
    facts = ((None, None), (None, {key: "32"}), ("fa16", {key: "32"}))
    found = [_run("two_level", problem, precision, overrides) for precision, overrides in facts]
    launches = [r.timing.launch_s * 1e6 for r in found if r.timing is not None]
    return tuple(HOST_US + r.latency_us - launch for r, launch in zip(found, launches, strict=True))


#: Lists of operators of unfused attention (`npusim.library.standard.OPERATORS`).
UNFUSED = ("fused", "eager", "eager_float32")


@cache
def _standard(problem: Problem, operators: str) -> RunResult:
    tile = BATCH_MATMUL if problem.head_dim == DEIT_DIM else {}
    return _run("standard", problem, operators=operators, **tile)


class Layer(NamedTuple):
    """FastAttention over unfused attention by list of operators, at one length of PanGu-38B."""

    unified: tuple[float, ...]
    two_level: tuple[float, ...]
    all_reduce: tuple[float, ...]


@cache
def layer(seq: int) -> Layer:
    """Return the speed-ups of five heads on a device, and of the whole layer on eight with its AllReduce.

    Unfused, projection and AllReduce follow attention; with tiling-AllReduce they overlap two-level tiling.
    """
    problem = attention(seq, 5, causal=True)
    unified, two = _us("unified", problem, block=128), _us("two_level", problem)
    plain = [_standard(problem, operators).latency_us for operators in UNFUSED]
    load = load_workload("pangu_38b")
    whole = LayerProblem.around(load.problem(seq=seq, tensor_parallel=8, causal=True), hidden=load.hidden or 1, ranks=8)

    def node_us(**tiling: Any) -> float:
        return run(
            "tiling_allreduce", hw=DEVICE + "_x8", workload=load, problem=whole, tiling=tiling, numerics=False
        ).latency_us

    apart, tiled = node_us(blocks=1, attention="standard"), node_us()
    behind = apart - plain[0]
    return Layer(
        tuple(us / unified for us in plain),
        tuple(us / two for us in plain),
        tuple((us + behind) / tiled for us in plain),
    )


class Hosts(NamedTuple):
    """What a gain over eager operators asks of the host at one length: a call, its kernel, an operator's issue (us)."""

    kernel_us: float
    issue_us: float


def asked_of_host(seq: int, schedule: str, gain: float) -> Hosts:
    """Return the time of a host for each operator if FastAttention's kernel has ``gain`` over eager attention."""
    problem = attention(seq, 5, causal=True)
    fields: dict[str, Any] = {"block": 128} if schedule == "unified" else {}
    result = _run(schedule, problem, **fields)
    count = len(_standard(problem, "eager").program.phases)
    return Hosts(result.device.seconds(result.cycles) * 1e6, gain * result.latency_us / count)


# ---------------------------------------------------------------- vision transformers

#: FastAttention's table 7: width, layers, tokens, and its shares of Q K V, attention, O, MLP and others in percent.
TABLE_7 = {
    "ViT-B/384": (768, 12, 577, (22, 11, 7, 59, 1)),
    "ViT-B": (768, 12, 197, (24, 4, 8, 63, 1)),
    "DeiT-S": (384, 12, 197, (23, 8, 8, 61, 1)),
    "DeiT-Ti": (192, 12, 197, (21, 14, 7, 56, 2)),
}
#: Elements of a patch, and classes.
PATCH, CLASSES = 16 * 16 * 3, 1000


def shares() -> dict[str, tuple[float, ...]]:
    """Return the shares of multiplications in percent, in table 7's columns; others: patches and classes."""
    found = {}
    for name, (width, layers, tokens, _) in TABLE_7.items():
        square = tokens * width * width
        ends = (tokens - 1) * PATCH * width + width * CLASSES
        parts = (*(layers * x for x in (3 * square, 2 * tokens**2 * width, square, 8 * square)), ends)
        found[name] = tuple(100 * x / sum(parts) for x in parts)
    return found


# ---------------------------------------------------------------- operators of a framework

#: Attention of DeiT-B.
DEIT_TOKENS, DEIT_HEADS, DEIT_DIM = 197, 12, 64
#: Two blocks of keys for all rows of a head: the best tile of two-level tiling there.
DEIT_TILE: dict[str, Any] = {"block_q": 208, "block_kv": 128, "vector_rows": 32}
#: What the vendor's rule (ops-nn batch_mat_mul_v3, DoMultiBatchTilingImpl) gives for 197 x 64 by 64 x 197.
BATCH_MATMUL: dict[str, Any] = {"block_m": 112, "block_n": 256, "block_k": 64}


def deit_problem(batch: int) -> Problem:
    """Return DeiT-B's attention of a batch."""
    return attention(DEIT_TOKENS, DEIT_HEADS, causal=False, batch=batch, head_dim=DEIT_DIM)


class Operator(NamedTuple):
    """A kernel of eager attention: bytes between global memory and the cores, and microseconds."""

    name: str
    megabytes: float
    us: float
    busiest: str
    share: float


def deit_operators(batch: int) -> list[Operator]:
    """Return the kernels of DeiT-B's eager attention, with the engine that is busiest in each."""
    whole = _standard(deit_problem(batch), "eager")
    found = []
    for phase, one in zip(whole.program.phases, _phases(whole), strict=True):
        busy = {u.queue: u.busy_cycles for u in one.queues[0]}
        queue = max(busy, key=lambda q: busy[q])
        us = whole.device.seconds(one.cycles) * 1e6
        engine = queue.replace("aiv0.", "aiv ").replace("aiv1.", "aiv ").replace("aic.", "aic ")
        found.append(Operator(phase.name, one.link_bytes["l2"] / 1e6, us, engine, busy[queue] / one.cycles))
    return found


def _phases(result: RunResult) -> Iterator[TimingResult]:
    for phase in result.program.phases:
        timing = simulate_program(replace(result.program, phases=(phase,)), result.device, "auto")
        assert isinstance(timing, TimingResult)
        yield timing


class Deit(NamedTuple):
    """DeiT-B at one batch: FastAttention's kernel as predicted and its bounds, unfused attention (calls, us)."""

    kernel: float
    overlapped: float
    narrow: float
    memory: float
    unfused: tuple[float, ...]


@cache
def deit(batch: int) -> Deit:
    """Return calls of two-level tiling and of unfused attention.

    ``overlapped``: the kernel if a core's next head began while its last one is worked on, its busiest engine
    without a gap; ``narrow``: so with softmax in float16.  ``memory``: The time to read Q, K and V and to write O once,
    at the rate of HBM.
    """
    problem = deit_problem(batch)
    result = _run("two_level", problem, **DEIT_TILE)
    half = _run("two_level", problem, "fa16", **DEIT_TILE)
    size = 4 * problem.batch * problem.heads * problem.seq_q * problem.head_dim * 2
    memory = size / float(result.device.links["hbm"].bytes_per_s.value) * 1e6
    unfused = tuple(_standard(problem, operators).latency_us for operators in UNFUSED)
    return Deit(result.latency_us, _without_gaps(result), _without_gaps(half), memory + _launch_us(result), unfused)


def _launch_us(result: RunResult) -> float:
    return result.latency_us - result.device.seconds(result.cycles) * 1e6


def _without_gaps(result: RunResult) -> float:
    assert isinstance(result.timing, TimingResult)
    busiest = max(u.busy_cycles for group in result.timing.queues for u in group)
    return result.device.seconds(busiest) * 1e6 + _launch_us(result)


class Native(NamedTuple):
    """Published eager attention: batch, length, microseconds measured, and predicted by list of operators."""

    batch: int
    seq: int
    measured: float
    predicted: tuple[float, ...]


#: RL-Align/RL-Kernel pull request 320, one die of an A3, CANN 9.0, bfloat16, 20 consecutive calls. Its
#: benchmark has 32 heads of 128, 8 of K and V, causal; its code repeat_interleave, matmul, mul, masked_fill, softmax.
NATIVE = {(1, 512): 246.0, (1, 1024): 840.0, (1, 2048): 3516.0, (4, 2048): 13298.0}


def native() -> list[Native]:
    """Return published and predicted times of eager attention."""
    found = []
    for (batch, seq), us in NATIVE.items():
        problem = Problem(
            batch=batch, heads=32, kv_heads=8, seq_q=seq, seq_kv=seq, head_dim=128, dtype="bfloat16", causal=True
        )
        times = (_standard(problem, operators).timing for operators in UNFUSED)
        found.append(Native(batch, seq, us, tuple(t.times_s["back_to_back"] * 1e6 for t in times if t is not None)))
    return found
