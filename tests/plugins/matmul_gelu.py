"""C = gelu(A B) in one kernel, with the sigmoid's approximation x / (1 + e^(-1.702 x)): no attention at all."""

from dataclasses import dataclass

from npusim.kernel import Field, GemmProblem, GlobalTensor, Tiling, exp, grid, kernel, schedule


class Blocks(Tiling):
    """Tile of C."""

    block_m: int = Field(default=128, ge=16, multiple_of=16, description="rows of a tile of C")
    block_n: int = Field(default=256, ge=16, multiple_of=16, description="columns of a tile of C")


@dataclass(frozen=True)
class Formats:
    """What C is stored in."""

    name: str
    output: str

    def formats(self):
        return {"output": self.output}


@kernel(results="c", a="m k", b="k n")
def gemm_gelu(a, b, fmt):
    x = (a @ b).to("float32")
    return (x / (exp(x * -1.702) + 1.0)).to(fmt)


def phases(problem, tiling, precision, machine):
    m, n, k, tile = problem.m, problem.n, problem.k, {"m": tiling.block_m, "n": tiling.block_n}
    a, b = GlobalTensor("a", 1, 1, m, k, problem.dtype, "input"), GlobalTensor("b", 1, 1, k, n, problem.dtype, "input")
    c = GlobalTensor("c", 1, 1, m, n, precision.output, "output")
    return [gemm_gelu.phase("matmul_gelu", grid(c, *tile.items()), {**tile, "k": k}, [c], a=a, b=b, fmt=c.fmt)]


MATMUL_GELU = schedule(
    "matmul_gelu",
    phases,
    tiling=Blocks,
    problem=GemmProblem,
    families=["ascend"],
    precisions=[Formats("float16", "float16"), Formats("float32", "float32")],
    summary="C = gelu(A B)",
)
