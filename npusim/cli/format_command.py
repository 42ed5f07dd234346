"""``npusim format``: code points of a number format, and a block quantised step by step."""

from typing import Annotated

from npusim.cli import options as o
from npusim.cli.console import show_either
from npusim.cli.help import Verbs
from npusim.errors import SpecError

app = Verbs()

#: Values that are cast by default: small ones in one block with the largest, a tie, an outlier.
EXAMPLE = "0.1,-0.3,1,-1.25,2.5,3.3,-7,13"


@app.verb(
    "format",
    ("npusim format", "all number formats"),
    ("npusim format mxfp4", "code points, scale rules, and an example block, step by step"),
    ("npusim format nvfp4 --rule four_over_six_mse_256 --values 6,1,-0.2", "another rule, and your own values"),
    ("npusim format hifloat8", "every code of an 8-bit format"),
)
def show_format(
    name: Annotated[str | None, o.argument("[NAME]", "A number format or block format; default: list all.")] = None,
    rule: Annotated[
        str | None, o.option("--rule NAME", "Rule that chooses the scale of a block.", shown="the format's")
    ] = None,
    values: Annotated[
        str, o.option("--values X,...", "Numbers to cast, or to store as a block.", shown=True)
    ] = EXAMPLE,
    json: o.Json = False,
) -> None:
    """Show a number format: its code points, its scale rules, a block quantised step by step."""
    from npusim.formats import BLOCK_FORMATS, FORMATS
    from npusim.formats.float_format import lookup
    from npusim.report import number_formats as r

    if name is None:
        show_either(json, r.formats_document, r.formats_table)
        return
    numbers = o.numbers(values, "--values", "finite numbers, such as 0.3,-1,5", bool)
    if name in BLOCK_FORMATS:
        fmt = BLOCK_FORMATS[name]
        if len(numbers) > fmt.block:
            raise SpecError(f"--values: {len(numbers)} numbers; a block of {fmt.name} has {fmt.block}")
        show_either(json, lambda: r.block_document(fmt, rule, numbers), lambda: r.block_table(fmt, rule, numbers))
        return
    if name not in FORMATS:
        lookup({**FORMATS, **BLOCK_FORMATS}, name, "number format")
    element = FORMATS[name]
    if rule is not None:
        raise SpecError(f"--rule: {name} has no scale; formats with a scale: {', '.join(BLOCK_FORMATS)}")
    show_either(json, lambda: r.element_document(element), lambda: r.element_table(element, numbers))
