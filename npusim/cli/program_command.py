"""``npusim program``: rings and operations of a schedule's tile program."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from npusim.cli import options as o
from npusim.cli.console import late_progress, show_either, write
from npusim.cli.help import Verbs
from npusim.simulation.request import CallOptions, Request, refuse, short_name

if TYPE_CHECKING:
    from npusim.report.program_table import Printed
    from npusim.simulation.plan import Plan

app = Verbs()


@app.verb(
    "program",
    ("npusim program flash", "rings, and the operations of the most frequent block"),
    ("npusim program pasa --hw ascend_950 --seq 8k", "on another device"),
    ("npusim program flash -t block_kv=256 --diff flash", "the effect of another tile"),
    ("npusim program mine.py:MINE --json", "for a script"),
    ("npusim program flash --no-causal -t ... --as tilelang -o flash.py", "as a TileLang-Ascend program"),
    first="--seq --hw --tiling --json",
)
@o.takes(CallOptions)
def program(
    request: Request,
    *,
    diff: Annotated[
        str | None,
        o.option(
            "--diff OTHER", "Print the differences from the program of OTHER: a schedule, with its options in quotes."
        ),
    ] = None,
    language: Annotated[
        Literal["tilelang"] | None,
        o.option("--as tilelang", "Print the program as an expert program of TileLang-Ascend (npusim help tilelang)."),
    ] = None,
    every: Annotated[
        str,
        o.option(
            "--every NAME=STEP",
            "With --as: a length (seq_kv, ...) that is an argument of the text, in steps.",
            shown=False,
        ),
    ] = "",
    out: Annotated[Path | None, o.option("--out -o FILE", "With --as: file to write.", shown="stdout")] = None,
    json: o.Json = False,
) -> None:
    """Print the tile program of a schedule: its queues and their waits, the depth of each ring, the lag of a product.

    A ring is a FIFO of slots between queues; "K ready" is a filled slot of ring K, "K free" an empty one. A region
    k[512*kv:+128] is 128 rows of tensor k, beginning at row 512*kv. Nothing is simulated, except to choose a tile.
    """
    from npusim.report.program_table import (
        difference_document,
        difference_table,
        program_difference,
        program_document,
        program_table,
    )
    from npusim.simulation.plan import plan_of

    if language is not None:
        refuse({"--diff": diff, "--json": json or None}, f"--as {language} prints the program's text")
        from npusim.simulation.written_program import written_program

        with late_progress(f"building {short_name(request.schedule)}"):
            text = written_program(request, every=every)
        typer.echo(text, nl=False) if out is None else write(out, text)
        return
    refuse({"--every": every or None, "--out": out}, "these options are for --as")
    printed = _printed(plan_of(request, is_bare=True), short_name(request.schedule))
    if diff is None:
        show_either(json, lambda: program_document(printed), lambda: program_table(printed))
        return
    other = plan_of(o.Worded.of(diff).on(request), is_bare=True)
    difference = program_difference(printed, _printed(other, diff))
    show_either(json, lambda: difference_document(difference), lambda: difference_table(difference))


def _printed(plan: "Plan", name: str) -> "Printed":
    from npusim.report.program_table import Printed
    from npusim.simulation.chosen_tile import program_of

    with late_progress(f"building {name}"):
        plan, tile_program = program_of(plan)
        return Printed.of(name, tile_program, plan.device.name)
