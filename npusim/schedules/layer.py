"""A decoder layer of our own programs: norm, Q K V, rotary, attention, projection, AllReduce, FFN, AllReduce.

A model is such layers one after the other, some with K and V on the host, and the vocabulary's product.
Every model has root mean square norms and rotary embeddings here, whatever its own are: a small part of a layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from npusim.config.problem import GemmProblem, ModelProblem, RowsProblem
from npusim.config.tiling import Field
from npusim.errors import TilingError
from npusim.node.kernel import Child, NodeKernel
from npusim.node.memory import plan, refuse_too_large
from npusim.node.program import COMPUTE, RowBlock, Task, block_tasks, cut_rows, task_program
from npusim.schedules.allreduce import OverlapTiling, check_ranks, communication, element_bytes, node_schedule
from npusim.schedules.offload import attention_kernel, attention_tasks, check_host
from npusim.schedules.tiling_allreduce import row_pieces

if TYPE_CHECKING:
    from collections.abc import Mapping

    from npusim.config.node import NodeDevice
    from npusim.ir.program import TileProgram
    from npusim.node.program import Communication
    from npusim.schedules.allreduce import PartialSums
    from npusim.schedules.offload import Strategy


class LayerTiling(OverlapTiling):
    """Row blocks of a layer, its attention, and where K and V are."""

    blocks: int = Field(default=1, ge=1, description="blocks of rows whose AllReduce runs beside the next's kernels")
    attention: str = Field(
        default="auto", description="of a device; auto: two_level or flash in prefill, split_kv for single queries"
    )
    offload: Literal["none", "classic", "cooperative"] = Field(
        default="none", description="of K and V to the host, and who computes their attention"
    )
    gpu_layers: int | None = Field(
        default=None, ge=0, description="that keep K and V on the devices; default: all, or as many as fit"
    )
    cpu_layers: int | None = Field(default=None, ge=0, description="that keep them on the host; default: the others")
    output: int = Field(default=0, ge=0, description="tokens generated, for which K and V have room")
    overhead_us: float = Field(default=0.0, ge=0, description="of a framework, for each layer; a line of its own")


@dataclass(frozen=True, slots=True)
class Period:
    """A program that a model runs ``count`` times."""

    program: TileProgram
    count: int


def periods(
    problem: ModelProblem, tiling: LayerTiling, device: NodeDevice, precision: PartialSums
) -> tuple[Period, ...]:
    """Return the programs of a model: layers with K and V on the host, those without, the vocabulary's product.

    Raises
    ------
    TilingError
        Layer counts that do not add up, a host that the node's file lacks, more ranks than devices.
    SpecError
        The model does not fit into the memory there is.
    """
    check_ranks(device.node, problem.ranks)
    on_host = layers_on_host(problem, tiling, device)
    refuse_too_large(problem, device, on_host, tiling.output)
    counts: Mapping[Strategy, int] = {tiling.offload: on_host, "none": problem.layers - on_host}
    found = [
        Period(_layer(problem, tiling, device, precision, strategy), count)
        for strategy, count in counts.items()
        if count
    ]
    if problem.vocab:
        found.append(Period(_head(problem), 1))
    return tuple(found)


def layers_on_host(problem: ModelProblem, tiling: LayerTiling, device: NodeDevice) -> int:
    """Return how many layers keep K and V on the host: as asked for, or as many as do not fit."""
    layers, gpu, cpu = problem.layers, tiling.gpu_layers, tiling.cpu_layers
    if gpu is not None and cpu is not None and gpu + cpu != layers:
        raise TilingError(f"gpu_layers, cpu_layers: {gpu} + {cpu} = {gpu + cpu}, but the model has {layers} layers")
    for name, count in (("gpu_layers", gpu), ("cpu_layers", cpu)):
        if count is not None and count > layers:
            raise TilingError(f"{name}: {count} of only {layers} layers")
    asked = cpu if cpu is not None else None if gpu is None else layers - gpu
    if tiling.offload == "none":
        if asked:
            said = "gpu_layers" if cpu is None else "cpu_layers"
            raise TilingError(
                f"{said}: K and V of {asked} layers on the host, but offload=none; take offload=cooperative, or classic"
            )
        return 0
    check_host(device, tiling.offload)
    return plan(problem, device, output=tiling.output).cpu_layers if asked is None else asked


def build(problem: ModelProblem, tiling: LayerTiling, device: NodeDevice, precision: PartialSums) -> TileProgram:
    """Return the layer of which a model has most."""
    return max(periods(problem, tiling, device, precision), key=lambda p: p.count).program


def _layer(
    p: ModelProblem, tiling: LayerTiling, device: NodeDevice, precision: PartialSums, strategy: Strategy
) -> TileProgram:
    comm = None
    if p.ranks > 1:
        comm = communication(device.node, p.ranks, tiling, p.hidden, element_bytes(precision))
    tasks = layer_tasks(p, tiling, device, comm, strategy)
    return task_program("layer", p.ranks, tasks, p.flops(), (COMPUTE, *((comm.queue,) if comm else ())))


def layer_tasks(
    p: ModelProblem, tiling: LayerTiling, device: NodeDevice, comm: Communication | None, strategy: Strategy
) -> list[Task]:
    """Return one layer's tasks; the next layer begins when the last one is over."""
    cuts = cut_rows(p.rows, tiling.blocks, tiling.first_share)
    tasks = block_tasks(0, RowBlock(0, p.rows, _before(p)))
    ends: list[int] = []
    if tiling.blocks == 1 or strategy != "none":
        tasks += attention_tasks(p.attention, strategy, tiling.attention, device, (len(tasks) - 1,), len(tasks))
        block = RowBlock(0, p.rows, (_product("projection", p.rows, p.hidden, p.width, p),))
        tasks += block_tasks(0, block, (len(tasks) - 1,))
        ends.append(_reduced(tasks, comm, 0, block, is_overlapped=False))
        cuts = cuts if strategy == "none" else [(0, p.rows)]
    else:
        for index, (row, rows) in enumerate(cuts):
            pieces = (attention_kernel(q, tiling.attention, device) for q in row_pieces(p.attention, row, rows))
            attention = NodeKernel("attention", tuple(c for k in pieces for c in k.children))
            block = RowBlock(row, rows, (attention, _product("projection", rows, p.hidden, p.width, p, is_fused=True)))
            tasks += block_tasks(index, block)
            ends.append(_reduced(tasks, comm, index, block, is_overlapped=True))
    for index, (row, rows) in enumerate(cuts):
        block = RowBlock(row, rows, _ffn(p, rows))
        tasks += block_tasks(index, block, tuple(ends) if len(ends) < len(cuts) else (ends[index],))
        _reduced(tasks, comm, index, block, is_overlapped=len(cuts) > 1)
    return tasks


def _reduced(tasks: list[Task], comm: Communication | None, index: int, block: RowBlock, *, is_overlapped: bool) -> int:
    """Append the AllReduce of a block, where there is more than one device; return the number of its end."""
    if comm is not None:
        op = comm.op(index, block, is_overlapped=is_overlapped)
        tasks.append(Task(op, (len(tasks) - 1,), block.rows * comm.row_bytes))
    return len(tasks) - 1


def _before(p: ModelProblem) -> tuple[NodeKernel, ...]:
    """Return what comes before attention: norm, the product with W_q, W_k and W_v, rotary embedding."""
    turned = RowsProblem(what="rotary", heads=p.heads + p.kv_heads, rows=p.rows, cols=p.head_dim // 2, dtype=p.dtype)
    return (
        _rows(RowsProblem(what="norm", rows=p.rows, cols=p.hidden, dtype=p.dtype), "norm"),
        _product("qkv", p.rows, p.qkv_width, p.hidden, p),
        _rows(turned, "rotary"),
    )


def _ffn(p: ModelProblem, rows: int) -> tuple[NodeKernel, ...]:
    """Return norm and FFN of some rows: up, with its gate where it has one, activation, down."""
    width = (2 if p.gated else 1) * p.ffn_width
    act = RowsProblem(what="gate" if p.gated else "gelu", rows=rows, cols=p.ffn_width, dtype=p.dtype)
    return (
        _rows(RowsProblem(what="norm", rows=rows, cols=p.hidden, dtype=p.dtype), "norm"),
        _product("up", rows, width, p.hidden, p),
        _rows(act, "activation"),
        _product("down", rows, p.hidden, p.ffn_width, p),
    )


def _head(p: ModelProblem) -> TileProgram:
    """Return the last norm and the vocabulary's product of one token a sequence, its columns shared."""
    columns = -(-p.vocab // p.ranks)
    norm = RowsProblem(what="norm", rows=p.batch, cols=p.hidden, dtype=p.dtype)
    block = RowBlock(0, p.batch, (_rows(norm, "norm"), _product("vocabulary", p.batch, columns, p.hidden, p)))
    return task_program("vocabulary", p.ranks, block_tasks(0, block), 2 * p.batch * columns * p.hidden, (COMPUTE,))


def _rows(problem: RowsProblem, name: str) -> NodeKernel:
    return NodeKernel("rows", (Child("rows", problem),), name=name)


def _product(name: str, m: int, n: int, k: int, p: ModelProblem, *, is_fused: bool = False) -> NodeKernel:
    return NodeKernel("linear", (Child("gemm", GemmProblem(m=m, n=n, k=k, dtype=p.dtype)),), is_fused, name)


SCHEDULES = (
    node_schedule(
        "layer",
        "a whole model, layer by layer: prefill, or a decoding step",
        build,
        tiling=LayerTiling,
        problem=ModelProblem,
    ),
)
