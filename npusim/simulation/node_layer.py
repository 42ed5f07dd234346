"""A layer on a node as it is asked for: its problem, from a workload or tensors, and its bits or why there are none."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from npusim import formats
from npusim.config.load import load_device
from npusim.config.problem import LayerProblem, ModelProblem, SharedProblem
from npusim.config.tiling import Tiling
from npusim.config.workload import shared_heads
from npusim.errors import SpecError
from npusim.node.collective import collective
from npusim.node.kernel import CollectiveOp, HostOp, KernelOp
from npusim.node.memory import longest, paper_layers, plan, shape_parameters
from npusim.node.program import ROW_GRAIN
from npusim.node.reduction import execute
from npusim.numerics.evaluate import evaluate
from npusim.numerics.inputs import array_source, projection_source, recipe_source
from npusim.schedules.layer import layers_on_host
from npusim.simulation.estimate import estimate, refuse_beyond
from npusim.simulation.node_bits import (
    LayerBits,
    LayerInputs,
    child_program,
    evaluate_layer,
    operations,
    sample_rows,
    without_program,
)
from npusim.simulation.request import refuse
from npusim.units import format_bytes, format_duration

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from npusim.config.node import NodeDevice, NodeSpec
    from npusim.config.problem import Problem
    from npusim.config.workload import Workload
    from npusim.ir.program import TileProgram
    from npusim.node.collective import Algorithm
    from npusim.node.result import NodeTiming
    from npusim.numerics.evaluate import Choice
    from npusim.numerics.executor import Progress


#: Estimated seconds beyond which nobody waits for a sample that was not asked for.
SAMPLE_S = 25


@dataclass(frozen=True, slots=True)
class Given:
    """What a user gives of a layer's inputs: Q, K, V of all its heads, W_o, a seed; and what changes its problem."""

    tensors: Mapping[str, NDArray[Any]] | None = None
    projection: NDArray[Any] | None = None
    seed: int | None = None
    changes: Callable[[Any], Any] | None = None


@dataclass(frozen=True, slots=True)
class NodeBits:
    """Which rows' bits are computed, within an estimate of ``limit_s`` seconds; ``name`` says what the inputs are."""

    rows: Choice = "sample"
    limit_s: float | None = None
    progress: Progress | None = None
    name: Callable[[Any], str] = str

    def inputs(self, problem: SharedProblem, given: Given | None) -> str:
        """Return what the inputs are, for the record."""
        drawn = isinstance(problem, LayerProblem) and (given is None or given.projection is None)
        return f"{self.name(problem)}{', W_o normal' if drawn else ''}"


def adapted(problem: Any, given: Given | None) -> Any:
    """Return a problem with the changes that are asked for."""
    return problem if given is None or given.changes is None else given.changes(problem)


def refuse_long(layer: SharedProblem, bits: NodeBits) -> None:
    """Raise `SpecError` where the rows asked for would take longer than they may."""
    if bits.rows != "sample":
        refuse_beyond(bits.limit_s, {"bits": _seconds(layer, bits.rows)})


def _seconds(layer: SharedProblem, rows: Choice) -> float:
    """Return an estimate of the seconds that the bits of all ranks take."""
    chosen = sample_rows(layer.seq_q) if rows == "sample" else rows
    return estimate(layer.whole, Tiling(), "auto", (chosen, "all"))["bits"]


def layer_bits(
    program: TileProgram,
    what: Any,
    machine: NodeDevice,
    fmt: str,
    load: Workload,
    given: Given | None,
    bits: NodeBits | None,
) -> tuple[LayerBits | None, tuple[str, ...]]:
    """Return the bits of a layer, and what is to be said of those of a collective."""
    calls = [op.call for op in operations(program) if isinstance(op, CollectiveOp)]
    if isinstance(what, ModelProblem):
        return None, ()
    if bits is not None and type(what) is SharedProblem:
        return _attention_bits(program, what, machine, load, given, bits), ()
    if bits is None or not calls or calls[0].kind != "allreduce":
        return None, ()
    ranks = len(program.phases[0].blocks)
    missing = without_program(program, machine.each)
    if missing or not isinstance(what, LayerProblem):
        why = f"bits not computed: {', '.join(missing)} has no mapping for {machine.each.family} cores"
        return None, (*([why] if missing else []), _bits_note(calls[0].algorithm, ranks, fmt))
    if bits.rows == "sample" and (seconds := _seconds(what, "sample")) > SAMPLE_S:
        last = max(0, what.seq_q - ROW_GRAIN)
        return None, (
            f"bits not computed: a sample of all {what.heads * ranks} heads would take about "
            f"{format_duration(seconds)}; --rows {last}-{what.seq_q - 1} computes the last rows",
        )
    found = evaluate_layer(
        program, what, machine, fmt, _layer_inputs(what, load, given), rows=bits.rows, progress=bits.progress
    )
    told = f"{fmt} sums of {ranks} ranks by {calls[0].algorithm}: relative RMSE {found.sum_rmse:.2e}"
    return found, (f"{told} against the float64 sums of the same partial sums",)


def _attention_bits(
    program: TileProgram, what: SharedProblem, machine: NodeDevice, load: Workload, given: Given | None, bits: NodeBits
) -> LayerBits:
    """Return the bits of the attention of all heads, by the device's kernel or by the host's."""
    op = next(op for op in operations(program) if isinstance(op, KernelOp | HostOp))
    child = op.call.child if isinstance(op, HostOp) else op.kernel.children[0]
    tensors = None if given is None else given.tensors
    whole, device = what.whole, machine.each
    if isinstance(op, HostOp) and machine.node.cpu is not None:
        device = load_device(machine.node.cpu.device)
    kv_heads = load.kv_heads if tensors is None else tensors["k"].shape[1]
    if whole.heads % kv_heads == 0 and kv_heads < whole.kv_heads:
        whole = whole.model_copy(update={"kv_heads": kv_heads})  # more devices than KV heads
    source = recipe_source(what) if tensors is None else array_source(tensors, what.data)
    found = child_program(replace(child, problem=whole), device)
    return LayerBits(evaluate(found, whole, source, rows=bits.rows, progress=bits.progress), (), 0.0)


def _layer_inputs(layer: LayerProblem, load: Workload, given: Given | None) -> LayerInputs:
    """Return the heads and the projection of a whole layer: those given, or drawn from its recipe."""
    heads, kv_heads = layer.heads * layer.ranks, layer.kv_heads * layer.ranks
    tensors = None if given is None else given.tensors
    if tensors is not None:
        kv_heads = tensors["k"].shape[1]
    elif heads == load.heads:
        kv_heads = load.kv_heads
    source = recipe_source(layer) if tensors is None else array_source(tensors, layer.data)
    matrix = None if given is None else given.projection
    if matrix is None:
        return LayerInputs(source, projection_source(layer, heads, layer.hidden), kv_heads)
    size = layer.value_head_dim
    return LayerInputs(source, lambda head: matrix[head * size : (head + 1) * size], kv_heads)


def layer_problem(
    load: Workload,
    node: NodeSpec,
    sizes: Mapping[str, Any],
    given: Given | None = None,
    kind: type[SharedProblem] = LayerProblem,
) -> SharedProblem:
    """Return a workload's layer on a node, or that of the tensors given; all devices share it unless told.

    Raises
    ------
    SpecError
        The heads cannot be divided by the ranks (lists the divisors), or the width is not stated.
    """
    ranks = sizes.get("tensor_parallel") or node.device_count.value
    if given is None or given.tensors is None:
        problem = load.problem(**{**sizes, "tensor_parallel": ranks})
    else:
        others = {n: value for n, value in sizes.items() if n != "tensor_parallel"}
        problem = given_problem(load, given.tensors, others, ranks)
    if not issubclass(kind, LayerProblem):
        return kind.around(problem, ranks=ranks)
    projection = None if given is None else given.projection
    hidden = load.hidden if projection is None else projection.shape[1]
    if hidden is None:
        raise SpecError(f"workload {load.name}: hidden: missing; the output projection needs it")
    if kind is not ModelProblem:
        return kind.around(problem, ranks=ranks, hidden=hidden)
    missing = [name for name in ("layers", "intermediate") if getattr(load, name) is None]
    if missing:
        raise SpecError(f"workload {load.name}: {', '.join(missing)}: missing; a model's layers need them")
    return ModelProblem.around(
        problem,
        ranks=ranks,
        hidden=hidden,
        layers=load.layers,
        intermediate=load.intermediate,
        gated=load.gated,
        vocab=load.vocab or 0,
        parameters=load.parameters or 0,
    )


def model_notes(what: Any, fields: Any, machine: NodeDevice, timing: NodeTiming) -> tuple[str, ...]:
    """Return what a model's run says: its latency or rate, its memory, where K and V are."""
    if not isinstance(what, ModelProblem):
        return ()
    found, seconds = plan(what, machine, output=fields.output), timing.latency_s
    rate = f"{format_duration(seconds)} of prefill"
    if what.seq_q == 1:
        rate = f"{what.batch / seconds:,.2f} tokens a second"
    overhead = "no framework overhead (-t overhead_us=...)"
    if fields.overhead_us:
        overhead = f"{fields.overhead_us:g} us a layer of framework overhead"
    printed = paper_layers(what, found.capacity_bytes, output=fields.output)
    where = layers_on_host(what, fields, machine)
    stated = (what.parameters or shape_parameters(what)) / 1e9
    shaped = f", its shapes {shape_parameters(what) / 1e9:.1f}" if what.parameters else ""
    offloaded = "; ".join(
        f"{longest(what, machine, is_offloaded=is_offloaded):,} {text}"
        for is_offloaded, text in ((False, "on the devices"), (True, "with K and V on the host"))
        if not is_offloaded or found.host_bytes is not None
    )
    return (
        f"{what.layers} layers: {rate}, {overhead}; {stated:.1f} billion parameters in layers{shaped}",
        f"memory of a device: {found.listed()}, of {format_bytes(found.capacity_bytes)}; K and V of {where} layers on "
        f"the host; L_GPU = {found.gpu_layers} of {what.layers}, by equation 37 as printed {printed:,.1f}",
        f"longest prompt in tokens: {offloaded}",
    )


def given_problem(
    load: Workload, tensors: Mapping[str, NDArray[Any]], sizes: Mapping[str, Any], devices: int = 1
) -> Problem:
    """Return the problem of one of ``devices`` that share the heads of the tensors given.

    ``sizes`` may say whether it is ``causal``; `SpecError` for any other, and for heads that cannot be shared.
    """
    q, k, v = (tensors[name] for name in ("q", "k", "v"))
    others = {n: value for n, value in sizes.items() if n != "causal"}
    refuse(others, "sizes come from the tensors given; leave these options out")
    heads, kv_heads = shared_heads(q.shape[1], k.shape[1], devices)
    return load.problem(
        batch=q.shape[0],
        heads=heads,
        kv_heads=kv_heads,
        seq_q=q.shape[2],
        seq_kv=k.shape[2],
        head_dim=q.shape[3],
        value_head_dim=v.shape[3],
        causal=sizes.get("causal"),
        dtype=str(q.dtype),
    )


def _bits_note(algorithm: Algorithm, ranks: int, fmt: str) -> str:
    """Return how the sum of the collective's real order differs from float64, on normal samples."""
    draw = np.random.default_rng(0)
    sample = 4096  # elements: enough for two digits of the error
    inputs = [formats.cast(draw.standard_normal(sample), fmt) for _ in range(ranks)]
    ring = collective("allreduce", "ring", ranks)
    other = collective("allreduce", "mesh" if algorithm == "ring" else algorithm, ranks)
    chosen = ring if algorithm == "ring" else other
    sums = {each.algorithm: execute(each, inputs, fmt)[0].astype(np.float64) for each in (ring, other)}
    exact = np.sum([part.astype(np.float64) for part in inputs], axis=0)
    rmse = float(np.linalg.norm(sums[chosen.algorithm] - exact) / np.linalg.norm(exact))
    differing = sums[ring.algorithm] != sums[other.algorithm]
    return (
        f"{fmt} sums of {ranks} normal samples by {chosen.algorithm}: relative RMSE {rmse:.2e} against float64; "
        f"{float(np.mean(differing)):.0%} differ in bits between ring and {other.algorithm}"
    )
