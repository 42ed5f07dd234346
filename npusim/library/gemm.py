"""A matrix product."""

from __future__ import annotations

from typing import Any

from npusim.kernel import (
    STORED,
    FlashPrecision,
    GemmProblem,
    GlobalTensor,
    Phases,
    check_multiplied,
    needs_groups,
    schedule,
)
from npusim.machine import Machine


def product(problem: GemmProblem, tiling: Any, p: FlashPrecision, machine: Machine) -> Phases:
    """Return C = A B for each product of the call: heads of one tensor."""
    m, n, k, fmt = problem.m, problem.n, problem.k, problem.dtype
    check_multiplied(machine.device, fmt)
    column = machine.column(fmt) if problem.operands == "nz" else 0
    is_transposed = problem.operands == "nt"
    right = (n, k) if is_transposed else (k, n)
    a, b = (
        GlobalTensor(name, 1, problem.count, *sizes, fmt, "input", column=column)
        for name, sizes in (("a", (m, k)), ("b", right))
    )
    output = problem.output_dtype if p.output == fmt else p.output
    c = GlobalTensor("c", 1, problem.count, m, n, output, "output")
    return list(machine.product("gemm", a, b, c, tiling, arithmetic=p.arithmetic, is_transposed=is_transposed))


SCHEDULES = schedule(
    "gemm",
    product,
    problem=GemmProblem,
    precisions=[STORED],
    tiling=None,
    kind="product",
    unsupported=needs_groups,
    summary="a matrix product, to validate the machine",
)
