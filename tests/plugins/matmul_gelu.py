"""C = gelu(A B) in one kernel, with the sigmoid's approximation x / (1 + e^(-1.702 x)): no attention at all."""

from dataclasses import dataclass

from npusim.kernel import (
    Field,
    GemmProblem,
    GlobalTensor,
    Loop,
    Opcode,
    Phase,
    Stage,
    Tiling,
    grid,
    name,
    product,
    row,
    schedule,
)  # fmt: skip

O = Opcode  # noqa: E741
STAGES = (
    Stage("product", (product("c", "a", "b"),)),
    Stage("gelu", (
        row(O.CAST, "x", "c"),
        row(O.MUL, "t", "x", "minus_1_702"),
        row(O.EXP, "t", "t"),
        row(O.ADD, "t", "t", "one"),
        row(O.DIV, "x", "x", "t"),
        row(O.CAST, "out", "x"),
    )),
)  # fmt: skip


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


def phases(problem, tiling, precision):
    p, m, n = problem, tiling.block_m, tiling.block_n
    a = GlobalTensor("a", 1, 1, p.m, p.k, p.dtype, "input")
    b = GlobalTensor("b", 1, 1, p.k, p.n, p.dtype, "input")
    c = GlobalTensor("c", 1, 1, p.m, p.n, precision.output, "output")
    tile = "m n"
    return [Phase(
        "matmul_gelu",
        {
            "a": name("operand", "m k", p.dtype), "b": name("operand", "k n", p.dtype),
            "c": name("partial", tile, "float32"), "x": name("work", tile, "float32"),
            "t": name("work", tile, "float32"), "out": name("result", tile, precision.output),
        },
        grid(c, ("m", m), ("n", n)), {"m": m, "n": n, "k": p.k}, (Loop(STAGES),), {"a": a, "b": b, "out": c},
        constants={"minus_1_702": -1.702, "one": 1.0},
    )]  # fmt: skip


MATMUL_GELU = schedule(
    "matmul_gelu", phases, tiling=Blocks, problem=GemmProblem, families=["ascend"],
    precisions=[Formats("float16", "float16"), Formats("float32", "float32")], summary="C = gelu(A B)",
)  # fmt: skip
