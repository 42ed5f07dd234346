"""``npusim layout``: which lane holds which element, drawn."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from npusim.cli import options as o
from npusim.cli.console import say, show, show_json
from npusim.cli.help import Verbs

if TYPE_CHECKING:
    from npusim.report.layouts import Picture, Square

app = Verbs()

Order = Literal["row", "col"]


@app.verb(
    "layout",
    ("npusim layout m8n8k4 --acc f16", "the accumulator of a quad pair"),
    ("npusim layout m8n8k4 --acc f32 --chain", "what must move before P·V"),
    ("npusim layout m8n8k4 --acc f16 --chain --arrangement 2x2", "as wmma arranges a warp"),
    ("npusim layout m16n8k16 --operand a --svg a.svg", "a picture file"),
)
def layout(
    instruction: Annotated[str, o.argument("INSTRUCTION", "m8n8k4, m16n8k8 or m16n8k16.")],
    acc: Annotated[Literal["f16", "f32"], o.option("--acc", "Format of the accumulators.", shown=True)] = "f32",
    operand: Annotated[
        Literal["a", "b", "c"] | None,
        o.option("--operand", "What to draw, or to chain into.", shown="c; a with --chain"),
    ] = None,
    a: Annotated[Order, o.option("--a", "How A lies in memory; m8n8k4 has both.", shown=True)] = "row",
    b: Annotated[Order, o.option("--b", "How B lies in memory; m8n8k4 has both.", shown=True)] = "col",
    chain: Annotated[
        bool, o.option("--chain", "Draw the accumulator and what the next product needs moved to other lanes.")
    ] = False,
    arrangement: Annotated[
        str | None,
        o.option(
            "--arrangement MxN",
            "Draw a warp whose quad pairs lie M down and N across: 4x1, 2x2, 1x4.",
            shown="one quad pair",
        ),
    ] = None,
    svg: Annotated[Path | None, o.option("--svg FILE", "Write the picture there, too.")] = None,
    json: o.Json = False,
) -> None:
    """Draw the lanes and registers that hold a matrix instruction's operand."""
    from npusim.layout import arrangement as arranged
    from npusim.layout import instruction as known
    from npusim.report import layouts as r

    found = known(instruction, acc=acc, a=a, b=b)
    where = arranged(arrangement) if arrangement is not None else None
    name = operand or ("a" if chain else "c")
    draw = r.chain_picture if chain else r.fragment_picture
    picture = draw(found, name, where)
    if svg is not None:
        from npusim.report.layout_svg import picture_svg
        from npusim.report.output import write_whole

        write_whole(svg, picture_svg(picture).encode())
        say(f"wrote {svg}")
    if json:
        show_json(r.chain_document(found, name, where) if chain else r.fragment_document(found, name))
    else:
        _draw(picture)


def _draw(picture: "Picture") -> None:
    """Print the picture: lanes as colours on a terminal, the same words elsewhere."""
    from npusim.report.layouts import picture_lines
    from npusim.report.text import Heading

    show([Heading(picture.title, picture.note)])
    if picture.legend:
        typer.echo(picture.legend)
    typer.echo()
    _show_tile([*picture_lines(picture)])
    typer.echo()
    show([picture.facts])


def _show_tile(lines: "list[tuple[tuple[str, Square | None], ...]]") -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    if not console.is_terminal or console.no_color or console.is_dumb_terminal:
        for line in lines:
            typer.echo("".join(text for text, _ in line).rstrip())
        return
    for line in lines:
        pieces = (
            (text, f"{'bold ' if square.needed_by else ''}black on {square.colour}") if square else (text, "dim")
            for text, square in line
        )
        # Long lines are the terminal's to wrap: a copied line stays one line.
        console.print(Text.assemble(*pieces), soft_wrap=True)
