"""Decoding with K and V of a layer on the host: they come up to the GPU, or the host's cores compute.

``offload_classic`` uploads K and V and computes on the devices; ``offload_cooperative`` sends one token's
Q, K and V down, computes on the host and brings the result up (FastAttention section 4.4, figure 6).
In prefill both compute on the devices while K and V go down beside them.
"""

from __future__ import annotations

from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from npusim.config.problem import SharedProblem
from npusim.config.tiling import Field, Tiling
from npusim.errors import TilingError
from npusim.formats import get_format
from npusim.node.kernel import Child, CopyCall, CopyOp, HostCall, HostOp, KernelOp, NodeKernel
from npusim.node.program import COMPUTE, CPU, DOWN, UP, Task, task_program
from npusim.schedules.allreduce import PartialSums, check_ranks, node_schedule

if TYPE_CHECKING:
    from npusim.config.node import NodeDevice
    from npusim.config.problem import Problem
    from npusim.ir.program import TileProgram
    from npusim.schedules.registry import Schedule

Strategy = Literal["none", "classic", "cooperative"]


class OffloadTiling(Tiling):
    """Which attention the devices run."""

    attention: str = Field(
        default="auto",
        description="of a device; auto: what the node's file states for decoding, else split_kv; or a schedule's name",
    )


PRECISIONS = MappingProxyType({"stored": PartialSums("stored", "input")})


def attention_kernel(problem: Problem, name: str, device: NodeDevice) -> NodeKernel:
    """Return attention on the devices: the kernel of the node's file, or a schedule of ours."""
    if problem.seq_q > 1:
        usual = {"ascend": "two_level"}.get(device.each.family, "flash")
        return NodeKernel("attention", (Child(usual if name == "auto" else name, problem),))
    table = device.node.kernels
    is_stated = name == "auto" and table is not None and table.decode is not None
    child = Child("split_kv" if name == "auto" else name, problem)
    return NodeKernel("decode" if is_stated else "attention", (child,), name="attention")


def attention_tasks(
    problem: Problem, strategy: Strategy, name: str, device: NodeDevice, after: tuple[int, ...] = (), first: int = 0
) -> list[Task]:
    """Return attention with K and V where ``strategy`` keeps them; the last task has its result.

    ``first`` is the number that the first task gets, ``after`` what has the token's Q, K and V.

    Raises
    ------
    TilingError
        The node's file lacks what the strategy needs: a link to the host, or its cores.
    """
    check_host(device, strategy)
    kernel = attention_kernel(problem, name, device)
    width = get_format(problem.dtype).size_bytes
    row = problem.batch * width
    rows = problem.batch * problem.seq_q
    run = Task(KernelOp("attention 0", COMPUTE, "COMPUTE", (), kernel=kernel, row=0, rows=rows))
    if strategy == "none":
        return [Task(run.op, after)]
    if problem.seq_q > 1:  # K and V go down beside the attention that reads them
        down = CopyOp("offload 0", DOWN, "DOWN", (), call=CopyCall("down", problem.kv_bytes(), is_bulk=True))
        return [Task(down, after), Task(run.op, after)]
    kv = problem.kv_heads * (problem.head_dim + problem.value_head_dim) * row
    if strategy == "classic":
        up = CopyOp("upload 0", UP, "UP", (), call=CopyCall("up", problem.kv_bytes(), is_bulk=True))
        return [Task(up, after), Task(run.op, (first,), problem.kv_bytes())]
    q, o = problem.heads * problem.head_dim * row, problem.heads * problem.value_head_dim * row
    computed = Child("flash", problem)  # FlashAttention-2 in the host's own arithmetic
    host = HostCall(computed, problem.kv_bytes(), problem.group_size * problem.kv_bytes() // width)
    return [
        Task(CopyOp("offload 0", DOWN, "DOWN", (), call=CopyCall("down", q + kv)), after),
        Task(HostOp("cpu 0", CPU, "CPU", (), call=host), (first,), q + kv),
        Task(CopyOp("return 0", UP, "UP", (), call=CopyCall("up", o)), (first + 1,), o),
    ]


def check_host(device: NodeDevice, strategy: Strategy) -> None:
    """Raise `TilingError` where a node's file lacks what a strategy needs."""
    node = device.node
    if strategy != "none" and node.pcie is None:
        raise TilingError(
            f"{node.name}: pcie: missing; offloading needs a link between host and devices in the node's file"
        )
    if strategy == "cooperative" and node.cpu is None:
        raise TilingError(
            f"{node.name}: cpu: missing; cooperative offloading needs the host's cores in the node's file"
        )


def build(
    strategy: Strategy, problem: SharedProblem, tiling: OffloadTiling, device: NodeDevice, _precision: PartialSums
) -> TileProgram:
    """Return attention of one layer whose K and V lie on the host.

    Raises
    ------
    TilingError
        More ranks than devices, or a node whose file has no host.
    """
    check_ranks(device.node, problem.ranks)
    tasks = attention_tasks(problem.attention, strategy, tiling.attention, device)
    return task_program(f"offload_{strategy}", problem.ranks, tasks, problem.flops(), (COMPUTE,))


def _schedule(strategy: Strategy, summary: str) -> Schedule:
    return node_schedule(
        f"offload_{strategy}",
        summary,
        partial(build, strategy),
        tiling=OffloadTiling,
        problem=SharedProblem,
        precisions=PRECISIONS,
        hw="v100_x8",
    )


SCHEDULES = (
    _schedule("classic", "K and V on the host: uploaded, attention on the devices"),
    _schedule("cooperative", "K and V on the host: attention on its cores, Q down and O up"),
)
