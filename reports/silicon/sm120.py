"""Compare predictions for chips of compute capability 12 with published times: `sm120.csv`, a table by group.

    python reports/silicon/sm120.py [MEASUREMENTS.csv ...] [--out reports/sm120/predictions.csv]

``MEASUREMENTS`` defaults to the given half, and `sm120_boards.csv`: three more RTX 5090 whose products are published.
``is_fitted``: cases by which a constant of a device file was fitted; the others were left out of every fit.  With
``--out`` each case is written, which the page reads.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
from contextlib import nullcontext
from math import ceil
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import npusim
from npusim.config.load import load_device
from npusim.config.problem import CopyProblem, GemmProblem, Problem
from npusim.errors import NpusimError
from npusim.program.timing.timing_result import TimingResult

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

MEASURED = Path(__file__).parents[3] / "shared" / "measurements" / "sm120.csv"
MORE = Path(__file__).with_name("sm120_boards.csv")
#: Tiles of the repository's products, rows, columns, piece of k and buffers, by device and date (its source).
TILES = {"rtx_pro_6000": (128, 128, 32, 3), "rtx_5090": (128, 64, 64, 2), "005ce42": (256, 128, 64, 2)}
#: Who copies pieces of k in a version (the same).
COPIES = {"v0": "threads", "v1_tma": "bulk", "v2_ws": "producer"}
#: Attention's tiles of rows, keys and stages by version (its source: v2 waits for each load, later ones load ahead).
ATTENTION = {"v2": (64, 64, 1), "v4": (64, 32, "library"), "v5": (64, 64, "library")}
#: Seconds without load before a version's calls of attention, in which a limited board does not slow down (the same,
#: main.py).
REST_S = "1"


class Method(NamedTuple):
    """How a source measures: what L2 holds, which of a launch's times, how the board differs from its file's, and the
    calls in a row, with those that warm up (0: as many as fill `BENCHED_S`).
    """

    l2: Literal["dirty", "steady", "repeated"] | None = None
    time: str = "call"
    board: Mapping[str, str] = MappingProxyType({})
    calls: int = 0


#: By part of the source's name.  Until March 2026 learn-cuda's calls are do_bench's, which fills 256 MiB between two of
#: them, a pause for a board at its limit; since then they are nvbench's, each on inputs of its own, for 10 ms and more
#: (its main.py).  The other benchmark warms up with 6 calls and times 30 on the same inputs (test.py); issue 160 is of
#: a board at the vendor's clock that falls to the same limit in milliseconds: products of 4096 are slow after 11 ms.
METHODS = {
    "33ba4c1": Method("steady", "back_to_back"),
    "005ce42": Method("steady", "back_to_back"),
    "learn-cuda": Method("dirty", "call", {"power.pause_s": "1.77e-4"}),
    "test-data#160": Method(
        "repeated", "back_to_back", {"products_clock_hz": "2.617e9", "power.settle_s": "0.005"}, 36
    ),
    "test-data": Method("repeated", "back_to_back", calls=36),
    "rtx_pro_6000_server vllm": Method("repeated", calls=9),
    "AIConfigurator": Method("repeated", calls=23),
}
#: Seconds for which do_bench warms up and times (triton/testing.py: 25 and 100 ms).
BENCHED_S = 0.125
#: Queries and microseconds from which on an RTX PRO 6000's attention decides its clock.
LEAST_QUERIES, LEAST_US = 1024, 300
#: Keys of a page of vLLM's cache (AIConfigurator, collector/vllm/collect_attn.py).
PAGE = 64
#: An RTX 5090 whose products without tensor cores are at 0.84 of the rate of three others (FP32, 55.5 of 65.7 TFLOP/s).
SLOW = "test-data#200"
#: Bytes of an element of attention's tensors.
BYTES = 2
#: Names of kernels whose source is not at hand, so that no prediction is theirs.
UNKNOWN = ("inductor", "triton", "sdpa_cudnn", "vector add", "Triton GEMM", "Triton FlashAttention", "RMSNorm", "v1 (")


def sizes(text: str) -> dict[str, Any] | None:
    """Return the sizes of attention that a shape states; None for a shape of something else."""
    number = {n: int(v) for n, v in re.findall(r"\b([BQKSD])(\d+)", text)}
    heads = re.search(r"\bH(\d+)(?:/(\d+))?", text)
    if not heads or "D" not in number:
        return None
    queries = number.get("Q", number.get("S", 1))
    return {
        "batch": number.get("B", 1),
        "heads": int(heads[1]),
        "kv_heads": int(heads[2] or heads[1]),
        "seq_q": queries,
        "seq_kv": number.get("K", queries),
        "head_dim": number["D"],
        "causal": "causal" in text,
    }


def asked(row: dict[str, str]) -> tuple[str, str, dict[str, Any]] | None:
    """Return the group of a case, its schedule and the options of its run; None if no kernel represents it."""
    kernel, device, shape = row["kernel"], row["device"], row["shape"]
    if not row["us"] or kernel.startswith(UNKNOWN):
        return None
    method = method_of(row)
    watts = {"power.limit_w": "400"} if row["clock"] == "400 W" and device == "rtx_5090" else {}
    options: dict[str, Any] = {"hw": device, "numerics": False, "trace_groups": (), "l2": method.l2}
    is_faster = "products_clock_hz" in method.board
    options["overrides"] = {**watts, **method.board}
    if device == "rtx_pro_6000":  # the device whose clock falls while calls follow one another
        calls = method.calls or ceil(BENCHED_S / float(row["us"]) * 1e6)
        options["overrides"] = {"power.calls_count": str(calls), **options["overrides"]}
    limit = ", 400 W" if watts else ", at the vendor's clock" if is_faster else ""
    if product := re.fullmatch(r"(\d+)x(\d+)x(\d+)", shape):
        m, n, k = map(int, product.groups())
        options["problem"] = GemmProblem(m=m, n=n, k=k, dtype=row["dtype"])
        if kernel in COPIES:
            tile = TILES["005ce42" if "005ce42" in row["source"] else device]
            options["tiling"] = dict(zip(("block_m", "block_n", "block_k", "stages"), tile, strict=True))
            options["tiling"]["copies"] = COPIES[kernel]
            return f"{device}, products of known tile{limit}", "gemm", options
        board = ", a slow board" if SLOW in row["source"] else limit
        return f"{device}, products of libraries{board}", "gemm", options
    if (call := sizes(shape)) is None:
        return None
    is_paged = "vllm" in kernel
    options["problem"] = Problem(**call, dtype=row["dtype"], page=PAGE if is_paged else 0)
    options["tiling"] = {"kernel": "fa2"}
    if kernel in ATTENTION:
        rows, keys, stages = ATTENTION[kernel]
        options["tiling"] = {"block_q": rows, "block_kv": keys, "warps": 4, "stages": stages}
    if watts:
        options["overrides"] = {**watts, "power.pause_s": REST_S}
    if kernel.startswith("flashinfer"):  # SGLang decodes on tensor cores from four heads of a KV head on
        options["tiling"] = {"kernel": "flashinfer"}
    if call["seq_q"] == 1:
        return (f"{device}, decode{' over 160 us' if float(row['us']) > 160 else ''}", "flash", options)
    by = (
        "FlashAttention-2 with pages"
        if is_paged
        else f"{kernel}, heads of {call['head_dim']}"
        if not limit
        else "attention"
    )
    span = ", 2,048 tokens and more" if call["seq_q"] >= 2048 and call["heads"] > call["kv_heads"] else ""
    return f"{device}, {by}{span}{limit}", "flash", options


def method_of(row: dict[str, str]) -> Method:
    """Return the method by which the source of a case measures."""
    return next((method for part, method in METHODS.items() if part in row["source"]), Method())


class Predicted(NamedTuple):
    """Microseconds of a case, and those of its cores; its mean clock, and the share of the tensor cores' peak."""

    us: float
    core_us: float
    clock_hz: float
    load: float


def predict(schedule: str, options: dict[str, Any], time: str = "call", *, copied: Sequence[int] = ()) -> Predicted:
    """Return the prediction of a case; ``time``: which of a launch's times.

    ``copied``: bytes that each of the other kernels of its operator copies (`copies_of`).  AIConfigurator times an
    operator of vLLM or SGLang as one graph of kernels (collector/vllm/collect_attn.py and
    collector/sglang/collect_attn.py).
    """
    result = npusim.run(schedule, **options)
    timing, device = result.timing, load_device(options["hw"])
    launch, peak = device.launch, device.peak_flops_per_s("float16")
    assert isinstance(timing, TimingResult)
    assert launch is not None
    assert launch.task_s is not None
    assert launch.gap_s is not None
    assert peak is not None
    core_s = timing.cycles / timing.clock_hz
    load = result.program.flops / timing.cycles / (peak / device.clock_hz.value)
    follows = launch.task_s.value + launch.gap_s.value - launch.kernel_overhead_s.value
    plain = {name: options[name] for name in ("hw", "numerics", "trace_groups")}
    copies = (npusim.run("copy", **plain, problem=CopyProblem(bytes=n), l2="repeated").latency_us for n in copied)
    us = 1e6 * timing.times_s[time] + sum(copies) + 1e6 * follows * len(copied)
    return Predicted(us, 1e6 * core_s, timing.clock_hz, load)


def copies_of(row: dict[str, str], problem: Problem) -> Iterator[int]:
    """Yield the bytes of the copies that an operator has besides attention; each copy is a separate kernel.

    The store of its new K and V in the cache; and where FlashAttention-2 of packed sequences has the query heads of a
    KV head as rows, Q in that order, of several KV heads, and the output in the caller's tensor (vllm-project/
    flash-attention 04325b67, csrc/flash_attn/flash_api.cpp, mha_varlen_fwd, seqlenq_ngroups_swapped).
    """
    if not row["note"].startswith("operator"):
        return
    yield problem.batch * problem.seq_q * problem.kv_heads * (problem.head_dim + problem.value_head_dim) * BYTES
    if row["kernel"] == "vllm_flash_attn_fa2" and problem.seq_q == 1 and problem.heads > problem.kv_heads:
        if problem.kv_heads > 1:
            yield problem.batch * problem.heads * problem.head_dim * BYTES
        yield problem.batch * problem.heads * problem.value_head_dim * BYTES


def is_decided(group: str, row: dict[str, str]) -> bool:
    """Return whether a constant was fitted on a case: the clock and the limit of a board under products.

    An RTX PRO 6000's: prefill and products of `LEAST_US` and more, but for short sequences and other boards.
    """
    if not group.startswith("rtx_pro_6000"):
        return "products" in group and "400 W" in group
    call = sizes(row["shape"])
    if call is None:
        return "test-data" in row["source"]
    return call["seq_q"] >= LEAST_QUERIES and float(row["us"]) >= LEAST_US


def main() -> None:
    """Write each case, or print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="*", default=[MEASURED, MORE])
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    with chosen.out.open("w", encoding="utf-8", newline="") if chosen.out else nullcontext(sys.stdout) as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(
            ("group", "kernel", "shape", "us", "predicted_us", "core_us", "clock_hz", "load", "calls", "is_fitted")
        )
        for row in (row for path in chosen.files for row in csv.DictReader(path.open(encoding="utf-8"))):
            if (case := asked(row)) is None:
                continue
            group, schedule, options = case
            try:
                copied = [*copies_of(row, options["problem"])] if schedule == "flash" else []
                predicted = predict(schedule, options, method_of(row).time, copied=copied)
            except NpusimError as error:
                print("refused:", group, row["shape"], error, file=sys.stderr)
                continue
            fitted = "yes" if is_decided(group, row) else ""
            calls = options["overrides"].get("power.calls_count", "")
            figures = f"{predicted.us:.1f}", f"{predicted.core_us:.1f}", f"{predicted.clock_hz:.4g}"
            writer.writerow(
                (group, row["kernel"], row["shape"], row["us"], *figures, f"{predicted.load:.3f}", calls, fitted)
            )
            file.flush()


if __name__ == "__main__":
    main()
