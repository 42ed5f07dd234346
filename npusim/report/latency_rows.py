"""Latencies of a grid of shapes as the tables that serving simulators read: predicted, with the band as a column.

``aiconfigurator``: columns of its ``gemm_perf``, ``context_attention_perf`` and ``generation_attention_perf`` files,
latency in ms.  ``msmodeling``: columns of its profiling database, shapes as text, duration in us.

Sources: ai-dynamo/aiconfigurator, its loaders' and collectors' column names; Ascend/msmodeling, profiling database.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from types import MappingProxyType
from typing import TYPE_CHECKING

from npusim import __version__
from npusim.config.problem import GemmProblem, Problem
from npusim.errors import SpecError, TilingError
from npusim.sanitize import csv_text
from npusim.simulation.simulate import run_request

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from npusim.simulation.request import Request
    from npusim.simulation.result import RunData

_ATTENTION = ("batch", "heads", "kv_heads", "seq_q", "seq_kv", "head_dim")
_CANN_FORMATS = MappingProxyType({"float16": "DT_FLOAT16", "bfloat16": "DT_BF16", "float32": "DT_FLOAT"})


def latency_rows(
    request: Request, axes: Mapping[str, Sequence[int]], form: str, progress: Callable[[int, int], None] | None = None
) -> tuple[str, tuple[str, ...]]:
    """Return a CSV table of predicted latencies of a grid of sizes, and why shapes have none.

    ``axes``: values of ``m n k``, or of ``batch heads kv_heads seq_q seq_kv head_dim``; ``form``: of `FORMS`.

    Raises `SpecError` for sizes of neither, a schedule without a time, or where no shape has a prediction.
    """
    sizes = set(axes)
    if sizes != {"m", "n", "k"} and not {"heads", "seq_q", "head_dim"} <= sizes <= set(_ATTENTION):
        known = f"m, n and k, or heads, seq_q and head_dim, and of {', '.join(_ATTENTION)} what else is asked for"
        raise SpecError(f"--grid: sizes {', '.join(axes)}: give {known}")
    rows, faults = [], []
    points = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    for number, point in enumerate(points):
        try:
            rows.append(FORMS[form](_run(request, point)))
        except (SpecError, TilingError) as error:
            faults.append(f"{', '.join(f'{k}={v}' for k, v in point.items())}: {error}")
        if progress:
            progress(number + 1, len(points))
    if not rows:
        raise SpecError(f"no shape has a prediction: {faults[0]}")
    return csv_text(rows[0], (row.values() for row in rows)), tuple(faults)


def _run(request: Request, sizes: Mapping[str, int]) -> RunData:
    dtype = {"dtype": request.dtype} if request.dtype else {}
    if "m" in sizes:
        problem: Problem | GemmProblem = GemmProblem.model_validate({**dtype, **sizes})
    else:
        given = {"batch": 1, "kv_heads": sizes["heads"], "seq_kv": sizes["seq_q"], **dtype, **sizes}
        problem = Problem.model_validate({**given, "causal": request.causal if request.causal is not None else True})
    asked = replace(request, problem=problem, workload=None, dtype=None, causal=None, numerics=False, trace_groups=())
    return run_request(asked)


def _band(run: RunData) -> str:
    known = run.timing.validated if run.timing else None
    return "" if known is None or known.most_error is None else f"{known.most_error:.4f}"


def _aiconfigurator(run: RunData) -> dict[str, object]:
    p = run.problem
    head = {"framework": "npusim", "version": __version__, "device": run.device.name}
    tail = {"latency": f"{run.latency_us / 1e3:.6f}", "band": _band(run)}  # latency in ms
    if isinstance(p, GemmProblem):
        sizes: dict[str, object] = {"gemm_dtype": p.dtype, "m": p.m, "n": p.n, "k": p.k}
        return {**head, "op_name": "gemm", "kernel_source": run.schedule, **sizes, **tail}
    assert isinstance(p, Problem)
    is_decode = p.seq_q == 1
    name = "generation_attention" if is_decode else "context_attention"
    sizes = {"batch_size": p.batch, "isl": 1 if is_decode else p.seq_q}
    sizes |= {"num_heads": p.heads, "num_key_value_heads": p.kv_heads, "head_dim": p.head_dim, "beam_width": 1}
    sizes |= {"attn_dtype": p.dtype, "kv_cache_dtype": p.dtype, "step": p.seq_kv - sizes["isl"]}  # type: ignore[operator]
    return {**head, "op_name": name, "kernel_source": run.schedule, **sizes, **tail}


def _msmodeling(run: RunData) -> dict[str, object]:
    p = run.problem
    if isinstance(p, GemmProblem):
        shapes: tuple[tuple[int, ...], ...] = ((p.m, p.k), (p.k, p.n), (p.m, p.n))
    else:
        assert isinstance(p, Problem)
        rows, kv = ((p.batch, h, s, p.head_dim) for h, s in ((p.heads, p.seq_q), (p.kv_heads, p.seq_kv)))
        shapes = (rows, kv, kv, rows)
    *inputs, output = shapes
    kind = _CANN_FORMATS.get(p.dtype, p.dtype)
    return {
        "Input Shapes": ";".join(",".join(map(str, shape)) for shape in inputs),
        "Input Data Types": ";".join([kind] * len(inputs)),
        "Input Formats": ";".join(["ND"] * len(inputs)),
        "Output Shapes": ",".join(map(str, output)),
        "Output Data Types": kind,
        "Output Formats": "ND",
        "Average Duration(us)": f"{run.latency_us:.3f}",
        "band": _band(run),
    }


#: What makes a row of a run, by the reader's name.
FORMS: Mapping[str, Callable[[RunData], dict[str, object]]] = MappingProxyType(
    {"aiconfigurator": _aiconfigurator, "msmodeling": _msmodeling}
)
