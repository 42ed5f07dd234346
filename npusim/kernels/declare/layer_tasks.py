"""A decoder layer of npusim's own programs, a model of such layers, and layers whose K and V are on the host.

A layer is norm, Q K V, rotary, cache, attention, projection, AllReduce, FFN, AllReduce; a model is a series of such
layers, some with K and V on the host, and the vocabulary's product.  Every model has root mean square norms and rotary
embeddings here, even if the real model has others: they are a small part of a layer.

A mixture of experts is a router's product, the choice of each token's experts, a copy of the tokens in the order of
experts, one grouped product for all chosen experts, and the sum of their results for each token.  Every device has
its columns of every expert.  The chosen experts are unknown: their number is the expected one for independent tokens,
with equal shares of the tokens.

Decoding with K and V on the host: ``offload_classic`` uploads them and computes on the devices; ``offload_cooperative``
sends one token's Q, K and V down, computes on the host's cores and sends the result up (FastAttention section 4.4,
figure 6).  In prefill both strategies compute on the devices while K and V are copied to the host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Literal, cast

from npusim.config.family import registered
from npusim.config.layers import ModelProblem
from npusim.config.node_file import NodeDevice
from npusim.config.problem import CopyProblem, GemmProblem, OperatorProblem, Problem, RowsProblem, SharedProblem
from npusim.config.tiling import Field, Tiling
from npusim.errors import TilingError
from npusim.formats import get_format
from npusim.kernels.declare.node_define import (
    NAMED,
    OverlapTiling,
    PartialSums,
    check_ranks,
    communication,
    element_bytes,
    node_schedule,
    prefill_attention,
    row_pieces,
)
from npusim.kernels.declare.registry import Schedule
from npusim.late_methods import dataclass
from npusim.machines.node.layers_in_memory import memory_plan, refuse_too_large
from npusim.machines.node.node_program import (
    COMPUTE,
    CPU,
    DOWN,
    UP,
    Child,
    Communication,
    CopyCall,
    CopyOp,
    HostCall,
    HostOp,
    KernelOp,
    NodeKernel,
    RowBlock,
    Task,
    block_tasks,
    cut_rows,
    task_program,
)
from npusim.program.ir.tile_program import TileProgram
from npusim.units import ceil_div

Strategy = Literal["none", "classic", "cooperative"]


class LayerTiling(OverlapTiling):
    """Fields of a layer: its row blocks, its attention, and the place of K and V."""

    blocks: int = Field(
        default=1,
        ge=1,
        description=("number of blocks of rows; the AllReduce of a block runs during the kernels of the next block"),
    )
    attention: str = Field(
        default="auto",
        description=(
            f"kernel on each device, {NAMED}; auto: two_level on ascend, flash on nvidia (on Hopper "
            "the kernel of cuDNN, which PyTorch uses), split_kv for single queries"
        ),
    )
    rows: str = Field(
        default="auto",
        description=(
            "kernel of norms, rotary embeddings and activations on each device, optionally with fields (rows:buffers=1)"
        ),
    )
    framework: Literal["fused", "eager"] = Field(
        default="fused",
        description=(
            "kernels between the products. fused: one kernel each for a norm with its residual sum, a rotary "
            "embedding and an activation; eager: one kernel for each operator of PyTorch (NVIDIA's GPUs)"
        ),
    )
    launches: Literal["graph", "host"] = Field(
        default="graph",
        description=(
            "kernels of a layer: launched as a graph, or one by one by the host, which needs "
            "launch.host_issue_s for each; this time excludes a framework (eager PyTorch takes 15 to 25 us a "
            "kernel on an H200's host: set overhead_us, or -C launch.host_issue_s=20e-6)"
        ),
    )
    offload: Literal["none", "classic", "cooperative"] = Field(
        default="none",
        description=("whether K and V are moved to the host, and which processor computes their attention"),
    )
    gpu_layers: int | None = Field(
        default=None,
        ge=0,
        description=("number of layers with K and V on the devices; default: all, or as many as fit"),
    )
    cpu_layers: int | None = Field(
        default=None, ge=0, description="number of layers with K and V on the host; default: all other layers"
    )
    output: int = Field(
        default=0, ge=0, description=("number of generated tokens for which memory of K and V is reserved")
    )
    overhead_us: float = Field(
        default=0.0, ge=0, description=("time of a framework for each layer; the table has a separate line for it")
    )


@dataclass(frozen=True, slots=True)
class Period:
    """A program that a model runs ``count`` times."""

    program: TileProgram
    count: int


def periods(
    problem: ModelProblem, tiling: LayerTiling, device: NodeDevice, precision: PartialSums
) -> tuple[Period, ...]:
    """Return the programs of a model: layers with K and V on the host, layers without, the vocabulary's product.

    Raises `TilingError` for layer counts with a wrong sum, a host that the node's file lacks, or more ranks than
    devices; `SpecError` if the model does not fit into memory.
    """
    check_ranks(device.node, problem.ranks)
    on_host = layers_on_host(problem, tiling, device)
    refuse_too_large(problem, device, on_host, tiling.output)
    places: list[Strategy] = [tiling.offload if layer < on_host else "none" for layer in range(problem.layers)]
    dense = [layer >= problem.layers - problem.dense_layers for layer in range(problem.layers)]
    kinds = Counter(zip(places, dense, problem.are_local, strict=True))
    programs = [
        Period(_layer(problem.layer_of(is_local=is_local), tiling, device, precision, place, is_dense), count)
        for (place, is_dense, is_local), count in kinds.items()
    ]
    if problem.vocab:
        programs.append(Period(_head(problem, tiling, device), 1))
    return tuple(programs)


def host_issue_s(tiling: LayerTiling, device: NodeDevice) -> float:
    """Return the time in which the host issues a kernel; 0 if a graph issues it.

    Raises `TilingError` if the device's file does not state it.
    """
    if tiling.launches == "graph":
        return 0.0
    issue = None if device.each.launch is None else device.each.launch.host_issue_s
    if issue is None:
        raise TilingError(f"launches: host; {device.each.name}'s file has no launch.host_issue_s; allowed: graph")
    return float(issue.value)


def model_program(
    problem: ModelProblem, tiling: LayerTiling, device: NodeDevice, precision: PartialSums
) -> TileProgram:
    """Return the program of the most frequent layer of a model, with the products of all layers; raise as `periods`
    does.
    """
    listed = periods(problem, tiling, device, precision)
    most = max(listed, key=lambda p: p.count).program
    return replace(most, flops=sum(p.program.flops * p.count for p in listed))


def layers_on_host(problem: ModelProblem, tiling: LayerTiling, device: NodeDevice) -> int:
    """Return the number of layers whose K and V are on the host: the requested number, or the number of layers that do
    not fit.
    """
    layers, gpu, cpu = problem.layers, tiling.gpu_layers, tiling.cpu_layers
    if gpu is not None and cpu is not None and gpu + cpu != layers:
        raise TilingError(f"gpu_layers, cpu_layers: {gpu} + {cpu} = {gpu + cpu}, but the model has {layers} layers")
    for name, count in (("gpu_layers", gpu), ("cpu_layers", cpu)):
        if count is not None and count > layers:
            raise TilingError(f"{name}: {count}, but the model has only {layers} layers")
    asked = cpu if cpu is not None else None if gpu is None else layers - gpu
    if tiling.offload == "none":
        if asked:
            field = "gpu_layers" if cpu is None else "cpu_layers"
            raise TilingError(
                f"{field}: K and V of {asked} layers are on the host, but offload=none; use offload=cooperative or "
                "classic"
            )
        return 0
    check_host(device, tiling.offload)
    return memory_plan(problem, device, output=tiling.output).cpu_layers if asked is None else asked


def _layer(
    p: ModelProblem, tiling: LayerTiling, device: NodeDevice, precision: PartialSums, strategy: Strategy, is_dense: bool
) -> TileProgram:
    comm = None
    if p.ranks > 1:
        comm = communication(device.node, p.ranks, tiling, p.hidden, element_bytes(precision))
    tasks = [_as_named(task, tiling) for task in layer_tasks(p, tiling, device, comm, strategy, is_dense=is_dense)]
    flops = p.layer_flops(is_dense=is_dense)
    return task_program("layer", p.ranks, tasks, flops, (COMPUTE, *((comm.queue,) if comm else ())))


def _as_named(task: Task, tiling: LayerTiling) -> Task:
    if tiling.rows == "auto" or not isinstance(task.op, KernelOp) or task.op.kernel.role != "rows":
        return task
    kernel = task.op.kernel
    children = [Child.named(tiling.rows, "rows", c.problem) if c.schedule == "rows" else c for c in kernel.children]
    return replace(task, op=replace(task.op, kernel=replace(kernel, children=tuple(children))))


def layer_tasks(
    p: ModelProblem,
    tiling: LayerTiling,
    device: NodeDevice,
    comm: Communication | None,
    strategy: Strategy,
    *,
    is_dense: bool = True,
) -> list[Task]:
    """Return one layer's tasks; the next layer begins when the last one ends."""
    cuts = cut_rows(p.rows, tiling.blocks, tiling.first_share)
    tasks = block_tasks(0, RowBlock(0, p.rows, _as_framework(p, tiling, device, _before(p))))
    ends: list[int] = []
    if tiling.blocks == 1 or strategy != "none":
        tasks += attention_tasks(p, strategy, tiling.attention, device, (len(tasks) - 1,), len(tasks))
        block = RowBlock(0, p.rows, _behind(p, p.rows))
        tasks += block_tasks(0, block, (len(tasks) - 1,))
        ends.append(_reduced(tasks, comm, 0, block, is_overlapped=False))
        cuts = cuts if strategy == "none" else [(0, p.rows)]
    else:
        for index, (row, rows) in enumerate(cuts):
            pieces = (attention_kernel(q, tiling.attention, device) for q in row_pieces(p.attention, row, rows))
            attention = NodeKernel("attention", tuple(c for k in pieces for c in k.children))
            block = RowBlock(row, rows, (attention, *_behind(p, rows, is_fused=True)))
            tasks += block_tasks(index, block)
            ends.append(_reduced(tasks, comm, index, block, is_overlapped=True))
    for index, (row, rows) in enumerate(cuts):
        ffn = _ffn(p, rows, p.ffn_width) if is_dense else _experts(p, rows)
        block = RowBlock(row, rows, _as_framework(p, tiling, device, (_norm(p, rows), *ffn)))
        tasks += block_tasks(index, block, tuple(ends) if len(ends) < len(cuts) else (ends[index],))
        _reduced(tasks, comm, index, block, is_overlapped=len(cuts) > 1)
    return tasks


def _reduced(tasks: list[Task], comm: Communication | None, index: int, block: RowBlock, *, is_overlapped: bool) -> int:
    """Append the AllReduce of a block if there is more than one device; return the number of its end."""
    if comm is not None:
        op = comm.op(index, block, is_overlapped=is_overlapped)
        tasks.append(Task(op, (len(tasks) - 1,), block.rows * comm.row_bytes))
    return len(tasks) - 1


def _before(p: ModelProblem) -> tuple[NodeKernel, ...]:
    """Return the tasks before attention: norm, the products that compute Q, K and V, rotary embedding, the cache's
    store.

    A separate kernel stores the data that a call adds to the cache (vLLM's reshape_and_cache; in a layer of Llama-3-8B
    that torch.compile has compiled, a kernel copies V, and the rotation of K also stores it,
    measurements/h200_layer.csv).
    """
    # All heads share the rotated key of a latent.
    heads, size = (p.heads + p.kv_heads, p.head_dim) if p.latent is None else (p.heads + 1, p.latent.rope_head_dim)
    turned = RowsProblem(what="rotary", heads=heads, rows=p.rows, cols=size // 2, dtype=p.dtype)
    named = [x for x in p.projections() if x[0] != "kv" or not p.is_absorbed]
    products = [_product(name, p.rows, columns, length, p) for name, columns, length in named]
    if p.latent is not None and p.is_absorbed:
        sizes = p.latent.kv_lora_rank, p.latent.nope_head_dim
        products.append(_product("q to latents", p.rows, *sizes, p, count=p.heads))
    stored = 2 * p.kv_heads * p.head_dim if p.latent is None else p.latent.kv_lora_rank + p.latent.rope_head_dim
    cached = CopyProblem(bytes=p.rows * stored * get_format(p.dtype).size_bytes)
    cache = NodeKernel("rows", (Child("copy", cached),), name="cache")
    return (_norm(p, p.rows), *products, _rows(turned, "rotary"), cache)


def _behind(p: ModelProblem, rows: int, *, is_fused: bool = False) -> tuple[NodeKernel, ...]:
    """Return the tasks after attention: the products that convert latents to values, if its results are latents, and
    the projection of O.
    """
    projection = _product("projection", rows, p.hidden, p.width, p, is_fused=is_fused)
    if p.latent is None or not p.is_absorbed:
        return (projection,)
    sizes = p.value_head_dim, p.latent.kv_lora_rank
    return _product("latents to v", rows, *sizes, p, count=p.heads), projection


def _norm(p: ModelProblem, rows: int) -> NodeKernel:
    return _rows(RowsProblem(what="norm", rows=rows, cols=p.hidden, dtype=p.dtype), "norm")


def _ffn(p: ModelProblem, rows: int, width: int, count: int = 1, of: str = "") -> tuple[NodeKernel, ...]:
    """Return the FFN of some rows, or ``count`` FFNs: the up projection (with the gate, if there is one), the
    activation, and the down projection.

    ``of`` precedes their names.
    """
    act = RowsProblem(what="gate" if p.gated else "gelu", heads=count, rows=rows, cols=width, dtype=p.dtype)
    return (
        _product(f"{of}up", rows, (2 if p.gated else 1) * width, p.hidden, p, count=count),
        _rows(act, f"{of}activation"),
        _product(f"{of}down", rows, p.hidden, width, p, count=count),
    )


def _experts(p: ModelProblem, rows: int) -> tuple[NodeKernel, ...]:
    """Return the mixture of experts of some rows, and the number of experts that they use together."""
    experts = p.experts
    assert experts is not None
    touched, chosen = experts.touched(rows), rows * experts.per_token
    choice = RowsProblem(what="route", parts=experts.per_token, rows=rows, cols=experts.count, dtype=p.dtype)
    combined = RowsProblem(what="sum", parts=experts.per_token, rows=rows, cols=p.hidden, dtype=p.dtype)
    tokens = CopyProblem(bytes=chosen * p.hidden * get_format(p.dtype).size_bytes)
    shared = ceil_div(experts.shared_width, p.ranks)
    return (
        _product("router", rows, experts.count, p.hidden, p),
        _rows(choice, "top-k"),
        NodeKernel("rows", (Child("copy", tokens),), name="dispatch"),
        *_ffn(p, ceil_div(chosen, touched), ceil_div(experts.width, p.ranks), touched, "experts' "),
        _rows(combined, "combine"),
        *(_ffn(p, rows, shared, of="shared ") if shared else ()),
    )


def _head(p: ModelProblem, tiling: LayerTiling, device: NodeDevice) -> TileProgram:
    """Return the last norm and the vocabulary's product for one token per sequence; the devices share the product's
    columns.
    """
    columns = -(-p.vocab // p.ranks)
    kernels = _norm(p, p.batch), _product("vocabulary", p.batch, columns, p.hidden, p)
    block = RowBlock(0, p.batch, _as_framework(p, tiling, device, kernels))
    tasks = [_as_named(task, tiling) for task in block_tasks(0, block)]
    return task_program("vocabulary", p.ranks, tasks, 2 * p.batch * columns * p.hidden, (COMPUTE,))


def _as_framework(
    p: ModelProblem, tiling: LayerTiling, device: NodeDevice, kernels: tuple[NodeKernel, ...]
) -> tuple[NodeKernel, ...]:
    """Return the kernels that a framework runs instead of these: in eager PyTorch one for each operator, and one for
    the residual sum.

    Raises `TilingError` for devices and models whose operators are not known.
    """
    if tiling.framework == "fused":
        return kernels
    known = f"framework: {tiling.framework}; npusim knows the operators of eager PyTorch for"
    if registered(device.each.family).processor != "gpu":
        raise TilingError(f"{known} GPUs, not for {device.each.name}; allowed: fused")
    if p.latent is not None or p.experts is not None:
        raise TilingError(f"{known} dense layers, not for latent projections or experts; allowed: fused")
    return tuple(one for kernel in kernels for one in _eager(p, kernel))


def _eager(p: ModelProblem, kernel: NodeKernel) -> Iterator[NodeKernel]:
    """Yield the kernels of eager PyTorch for an operation between products: Llama's modules in Transformers.

    Source: huggingface/transformers, models/llama/modeling_llama.py: LlamaRMSNorm, apply_rotary_pos_emb, LlamaMLP;
    launches as an H200's profile lists them (measurements/h200_layer.csv).
    """

    def operator(what: str, rows: int, cols: int, name: str = "") -> NodeKernel:
        one = OperatorProblem(what=what, rows=rows, cols=cols, dtype=p.dtype)
        return NodeKernel("rows", (Child("operator", one, is_near=True),), name=name or kernel.name)

    if kernel.role != "rows":
        yield kernel
    elif kernel.name == "cache":
        yield from [operator("store", p.kv_heads * p.rows, p.head_dim)] * 2  # one operator for K and one for V
    elif kernel.name == "rotary":  # x cos + rotated(x) sin, for Q and for K; x of one token is contiguous
        half, whole = p.head_dim // 2, p.head_dim
        listed = ("scale", whole), ("negate", half), ("join", whole), ("scale", whole)
        last = "plus" if p.seq_q > 1 else "add"
        for heads in (p.heads, p.kv_heads):
            yield from [operator(what, heads * p.rows, cols) for what, cols in (*listed, (last, whole))]
    else:
        problem = cast("RowsProblem", kernel.children[0].problem)
        rows, cols = problem.rows, problem.cols
        if kernel.name == "norm":
            yield operator("add", rows, cols, "residual")
            yield from [operator(what, rows, cols) for what in ("widen", "square", "mean")]
            yield from [operator("column", rows, 1)] * 2  # the addition of epsilon, and the reciprocal root
            yield from [operator(what, rows, cols) for what in ("rescale", "narrow", "scale")]
        else:
            yield from [operator(what, rows, cols) for what in (("silu", "times") if p.gated else ("gelu",))]


def _rows(problem: RowsProblem, name: str) -> NodeKernel:
    return NodeKernel("rows", (Child("rows", problem, is_near=True),), name=name)


def _product(
    name: str, m: int, n: int, k: int, p: ModelProblem, *, count: int = 1, is_fused: bool = False
) -> NodeKernel:
    problem = GemmProblem(m=m, n=n, k=k, dtype=p.dtype, count=count)
    return NodeKernel("linear", (Child("gemm", problem),), is_fused, name)


class OffloadTiling(Tiling):
    """The attention that the devices run."""

    attention: str = Field(
        default="auto",
        description=(
            f"kernel on each device, {NAMED}; auto: the kernel that the node's file names for decoding, else split_kv"
        ),
    )


def attention_kernel(problem: Problem, name: str, device: NodeDevice) -> NodeKernel:
    """Return attention on the devices: the kernel of the node's file, or one of npusim's schedules."""
    if problem.seq_q > 1:
        return NodeKernel("attention", (prefill_attention(name, device, problem),))
    table = device.node.kernels
    is_stated = name == "auto" and table is not None and table.decode is not None
    child = Child.named(name, "split_kv", problem)
    return NodeKernel("decode" if is_stated else "attention", (child,), name="attention")


def attention_tasks(
    p: SharedProblem, strategy: Strategy, name: str, device: NodeDevice, after: tuple[int, ...] = (), first: int = 0
) -> list[Task]:
    """Return attention with K and V where ``strategy`` stores them; the last task has its result.

    ``first`` is the number of the first task, ``after`` the task with the token's Q, K and V.

    Raises `TilingError` if the node's file lacks the link to the host, or the host's cores, that the strategy needs.
    """
    check_host(device, strategy)
    problem = p.attention
    kernel = attention_kernel(problem, name, device)
    width = get_format(problem.dtype).size_bytes
    row = problem.batch * width
    block = RowBlock(0, problem.batch * problem.seq_q, (kernel,))
    if strategy == "none":
        return block_tasks(0, block, after)
    if problem.seq_q > 1:  # K and V are copied down concurrently with the attention that reads them
        down = CopyOp("offload 0", DOWN, "DOWN", (), call=CopyCall("down", p.cached.kv_bytes(), is_bulk=True))
        return [Task(down, after), *block_tasks(0, block, after)]
    kv = problem.kv_heads * (problem.head_dim + problem.value_head_dim) * row
    if strategy == "classic":
        up = CopyOp("upload 0", UP, "UP", (), call=CopyCall("up", problem.kv_bytes(), is_bulk=True))
        return [Task(up, after), *block_tasks(0, block, (first,), problem.kv_bytes())]
    q, o = problem.heads * problem.head_dim * row, problem.heads * problem.value_head_dim * row
    computed = Child("flash", problem)  # FlashAttention-2 in the host's arithmetic
    host = HostCall(computed, problem.kv_bytes(), problem.group_size * problem.kv_bytes() // width)
    return [
        Task(CopyOp("offload 0", DOWN, "DOWN", (), call=CopyCall("down", q + kv)), after),
        Task(HostOp("cpu 0", CPU, "CPU", (), call=host), (first,), q + kv),
        Task(CopyOp("return 0", UP, "UP", (), call=CopyCall("up", o)), (first + 1,), o),
    ]


def check_host(device: NodeDevice, strategy: Strategy) -> None:
    """Raise `TilingError` if a node's file lacks an entry that a strategy needs."""
    node = device.node
    if strategy != "none" and node.pcie is None:
        raise TilingError(
            f"{node.name}: pcie: missing; offloading needs a link between host and devices in the node's file"
        )
    if strategy == "cooperative" and node.cpu is None:
        raise TilingError(
            f"{node.name}: cpu: missing; cooperative offloading needs the host's cores in the node's file"
        )


def _offload(
    strategy: Strategy, problem: SharedProblem, tiling: OffloadTiling, device: NodeDevice, _precision: PartialSums
) -> TileProgram:
    check_ranks(device.node, problem.ranks)
    tasks = attention_tasks(problem, strategy, tiling.attention, device)
    return task_program(f"offload_{strategy}", problem.ranks, tasks, problem.flops(), (COMPUTE,))


def left_on_nodes(device: NodeDevice) -> frozenset[str]:
    """Return the fields that a search does not vary: requested fields, fields that follow from memory, and fields of a
    host that the node does not have.

    The number of layers on the host is the smallest with which the other layers fit on the device: with more layers on
    the host the call is slower, with fewer it is refused.
    """
    asked = frozenset({"output", "gpu_layers", "cpu_layers"})
    return asked if device.node.pcie is not None else asked | {"offload"}


def offload_schedule(strategy: Strategy, summary: str) -> Schedule:
    """Return the schedule of attention with K and V on the host, by the strategy ``classic`` or ``cooperative``."""
    return node_schedule(
        f"offload_{strategy}",
        summary,
        partial(_offload, strategy),
        tiling=OffloadTiling,
        problem=SharedProblem,
        precisions=MappingProxyType({"stored": PartialSums("stored", "input")}),
        hw="v100_x8",
    )
