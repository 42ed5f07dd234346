"""Predicted latencies of a grid of shapes, in the form of the tables that serving simulators read; the band is an
additional column.

``aiconfigurator``: columns of its ``gemm_perf``, ``context_attention_perf`` and ``generation_attention_perf`` files,
latency in ms.  ``msmodeling``: columns of its profiling database, shapes as text, duration in us.

Sources: ai-dynamo/aiconfigurator, its loaders' and collectors' column names; Ascend/msmodeling, profiling database.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import singledispatch
from itertools import product
from typing import TYPE_CHECKING, NamedTuple, Unpack

from npusim import __version__
from npusim.config.document import read_text
from npusim.config.problem import GemmProblem, Problem
from npusim.errors import SpecError, TilingError
from npusim.report import charts
from npusim.report.charts import Figure
from npusim.report.text import Column, Columns, whole
from npusim.sanitize import csv_text
from npusim.simulation.request import CallOptions, Request
from npusim.simulation.simulate import run_request

if TYPE_CHECKING:
    from pathlib import Path

    from npusim.simulation.run_result import RunData

_ATTENTION = ("batch", "heads", "kv_heads", "seq_q", "seq_kv", "head_dim")


def latency_rows(
    schedule: str,
    axes: Mapping[str, Sequence[int]],
    form: str,
    progress: Callable[[int, int], None] | None = None,
    on_time: Callable[[Mapping[str, int], float], None] = lambda _point, _latency_us: None,
    **options: Unpack[CallOptions],
) -> tuple[str, tuple[str, ...]]:
    """Return a CSV table of predicted latencies of a grid of sizes, and the reasons for shapes without a latency.

    ``axes``: values of ``m n k``, or of ``batch heads kv_heads seq_q seq_kv head_dim`` (causal unless an option says
    otherwise); ``form``: ``aiconfigurator`` or ``msmodeling``.  ``on_time`` receives each shape and its latency in us.

    Raises `SpecError` for sizes of neither kind, for a schedule without a time, or if no shape has a prediction.
    """
    sizes = set(axes)
    if sizes != {"m", "n", "k"} and not {"heads", "seq_q", "head_dim"} <= sizes <= set(_ATTENTION):
        known = f"m, n and k, or heads, seq_q and head_dim, optionally with some of {', '.join(_ATTENTION)}"
        raise SpecError(f"--grid: sizes {', '.join(axes)}; needed: {known}")
    rows, faults = [], []
    points = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    request = Request(schedule, **options)
    bare = replace(request, workload=None, dtype=None, causal=None, numerics=False, trace_groups=())
    for number, point in enumerate(points, 1):
        given: dict[str, object] = {**({"dtype": request.dtype} if request.dtype else {}), **point}
        if "heads" in point:
            given = {"batch": 1, "kv_heads": point["heads"], "seq_kv": point["seq_q"], "causal": True, **given}
            given |= {"causal": request.causal} if request.causal is not None else {}
        try:
            problem = (Problem if "heads" in point else GemmProblem).model_validate(given)
            run = run_request(replace(bare, problem=problem))
            rows.append(_row(run, form))
            on_time(point, run.latency_us)
        except (SpecError, TilingError) as error:
            faults.append(f"{', '.join(f'{k}={v}' for k, v in point.items())}: {error}")
        if progress:
            progress(number, len(points))
    if not rows:
        raise SpecError(f"no shape has a prediction: {faults[0]}")
    return csv_text(rows[0], (row.values() for row in rows)), tuple(faults)


def drawn_size(axes: Mapping[str, Sequence[int]]) -> str:
    """Return the size over which latencies are drawn: the one with the most values; raise `SpecError` if no size has
    two values.
    """
    over = max(axes, key=lambda name: len(set(axes[name])), default="")
    if len(set(axes.get(over, ()))) < 2:
        raise SpecError(
            "--plot: the picture shows latency over a size, which needs two values or more: -g seq_q=1k,2k,4k"
        )
    return over


def latencies_figure(
    schedule: str, hw: str, axes: Mapping[str, Sequence[int]], times: Sequence[tuple[Mapping[str, int], float]]
) -> Figure:
    """Return the latencies of a grid over the size with the most values, one line for each combination of the other
    sizes.

    ``times``: sizes, and the latency in us.  Raises `SpecError` as `drawn_size`.
    """
    over = drawn_size(axes)
    others = [name for name in axes if name != over and len(set(axes[name])) > 1]
    rows = [
        {"name": " ".join(f"{n}={point[n]}" for n in others), "size": point[over], "latency_us": latency}
        for point, latency in sorted(times, key=lambda time: time[0][over])
    ]
    fixed = ", ".join(f"{name}={values[0]}" for name, values in axes.items() if name != over and name not in others)
    columns = Columns(
        Column("other sizes", "name"), Column(over, "size", whole, ">"), Column("latency us", "latency_us", ",.2f", ">")
    )
    title = f"{schedule} on {hw}: latency by {over}"
    return Figure("latencies", title, fixed, charts.curves(rows, over), columns.grid(rows))


def refuse_other_table(file: Path) -> None:
    """Raise `SpecError` for an existing file with content that is not such a table (its last column is ``band``)."""
    first = read_text(file).partition("\n")[0].rstrip() if file.exists() else ""
    if first and not first.endswith(",band"):
        raise SpecError(
            f"{file}: is not a table of latencies, so that npusim does not replace it; choose another "
            "name, or use --force"
        )


class _Operator(NamedTuple):
    """An operator of a table: its name, the format of its inputs, its sizes, and the shapes of inputs and output."""

    name: str
    dtype: str
    sizes: Mapping[str, object]
    shapes: tuple[tuple[int, ...], ...]


@singledispatch
def _operator(problem: object) -> _Operator:
    """Return the operator of a problem."""
    raise SpecError(f"latencies: a table can have products and attention, not a {type(problem).__name__}")


@_operator.register(GemmProblem)
def _product(p: GemmProblem) -> _Operator:
    sizes = {"gemm_dtype": p.dtype, "m": p.m, "n": p.n, "k": p.k}
    return _Operator("gemm", p.dtype, sizes, ((p.m, p.k), (p.k, p.n), (p.m, p.n)))


@_operator.register(Problem)
def _attention(p: Problem) -> _Operator:
    name = "generation_attention" if p.seq_q == 1 else "context_attention"
    sizes: dict[str, object] = {
        "batch_size": p.batch,
        "isl": p.seq_q,
        "num_heads": p.heads,
        "num_key_value_heads": p.kv_heads,
    }
    sizes |= {"head_dim": p.head_dim, "beam_width": 1, "attn_dtype": p.dtype, "kv_cache_dtype": p.dtype}
    sizes |= {"step": p.seq_kv - p.seq_q}
    q, kv = ((p.batch, heads, rows, p.head_dim) for heads, rows in ((p.heads, p.seq_q), (p.kv_heads, p.seq_kv)))
    return _Operator(name, p.dtype, sizes, (q, kv, kv, q))


def _row(run: RunData, form: str) -> dict[str, object]:
    known = run.timing.validated if run.timing else None
    band = {"band": "" if known is None or known.band is None else f"{known.band:.4f}"}
    name, dtype, sizes, shapes = _operator(run.problem)
    if form == "aiconfigurator":
        head = {"framework": "npusim", "version": __version__, "device": run.device.name, "op_name": name}
        return {**head, "kernel_source": run.schedule, **sizes, "latency": f"{run.latency_us / 1e3:.6f}", **band}
    *inputs, output = (",".join(map(str, shape)) for shape in shapes)
    kinds = {"float16": "DT_FLOAT16", "bfloat16": "DT_BF16", "float32": "DT_FLOAT"}
    texts = {"Shapes": inputs, "Data Types": [kinds.get(dtype, dtype)] * len(inputs), "Formats": ["ND"] * len(inputs)}
    columns: dict[str, object] = {f"Input {column}": ";".join(listed) for column, listed in texts.items()}
    columns |= {f"Output {column}": listed[0] for column, listed in {**texts, "Shapes": [output]}.items()}
    return {**columns, "Average Duration(us)": f"{run.latency_us:.3f}", **band}
