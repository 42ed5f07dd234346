"""``npusim layout``: a drawing of the lanes that hold the elements of an operand."""

from typing import Annotated, Literal

import typer

from npusim.cli import options as o
from npusim.cli.console import show, show_json, show_lines
from npusim.cli.help import Verbs
from npusim.report.text import Heading

app = Verbs()

Order = Literal["row", "col"]


@app.verb(
    "layout",
    ("npusim layout m8n8k4 --acc f16", "the accumulator of a quad pair"),
    ("npusim layout m8n8k4 --acc f32 --chain", "the elements that must move before P·V"),
    ("npusim layout m8n8k4 --acc f16 --chain --arrangement 2x2", "a warp's quad pairs as in wmma"),
)
def layout(
    instruction: Annotated[str, o.argument("INSTRUCTION", "m8n8k4, m16n8k8 or m16n8k16.")],
    acc: Annotated[Literal["f16", "f32"], o.option("--acc", "Format of the accumulators.", shown=True)] = "f32",
    operand: Annotated[
        Literal["a", "b", "c"] | None,
        o.option(
            "--operand",
            "Operand to draw; with --chain, the operand that the accumulator becomes in the next product.",
            shown="c; a with --chain",
        ),
    ] = None,
    a: Annotated[Order, o.option("--a", "Layout of A in memory; only m8n8k4 offers both.", shown=True)] = "row",
    b: Annotated[Order, o.option("--b", "Layout of B in memory; only m8n8k4 offers both.", shown=True)] = "col",
    chain: Annotated[
        bool, o.option("--chain", "Draw which elements of the accumulator the next product needs in other lanes.")
    ] = False,
    arrangement: Annotated[
        str | None,
        o.option(
            "--arrangement MxN",
            "Draw a warp with M quad pairs down and N across: 4x1, 2x2, 1x4.",
            shown="one quad pair",
        ),
    ] = None,
    json: o.Json = False,
) -> None:
    """Draw the lanes and registers that hold a matrix instruction's operand."""
    from npusim.formats.layout.fragment import arrangement as arranged
    from npusim.formats.layout.instruction import instruction as named
    from npusim.report import layouts as r

    mma = named(instruction, acc=acc, a=a, b=b)
    where = arranged(arrangement) if arrangement is not None else None
    name = operand or ("a" if chain else "c")
    picture = (r.chain_picture if chain else r.fragment_picture)(mma, name, where)
    if json:
        show_json(r.chain_document(mma, name, where) if chain else r.fragment_document(mma, name))
        return
    show([Heading(picture.title, picture.note)])
    if picture.legend:
        typer.echo(picture.legend)
    typer.echo()
    show_lines(r.picture_lines(picture))
    typer.echo()
    show([picture.facts])
