"""``npusim invariant``: what changes the bits of a call, what cannot, and what ruling it out costs."""

from typing import Annotated

from npusim.cli import options as o
from npusim.cli.console import progress, show, show_json
from npusim.cli.help import Verbs
from npusim.errors import CheckFailedError, SpecError
from npusim.simulation.request import Request, SeedOptions

app = Verbs()

Names = "batch, position, splits, merge, tile, packing, ranks, order"
Require = Annotated[
    str,
    o.option(
        "--require ASPECT,...",
        "Exit code 1 if a change of one of these was seen to change a bit: batch,splits.",
        panel="How",
        shown=False,
    ),
]
Vary = Annotated[str, o.option("--vary ASPECT,...", f"What to vary: {Names}.", panel="How", shown="all")]


@app.verb(
    "invariant",
    ("npusim invariant split_kv -w qwen2_7b --seq-q 1 --seq-kv 32k", "a decoding step, all that may vary"),
    ("npusim invariant split_kv --seq-q 1 -t splits=4 --require batch,position", "a test for your CI"),
    ("npusim invariant flash --seq 8192 --vary tile --json", "one aspect, for a script"),
)
@o.takes(SeedOptions, own_first=True)
def invariant(request: Request, *, require: Require = "", vary: Vary = "", json: o.Json = False) -> None:
    """Say what changes a call's bits, what cannot, and what ruling it out costs.

    A change that leaves the steps of a row as they are cannot change its bits; for others the bits are computed
    and the first element that differs is named, with the operation and tile where the computations part.
    """
    from npusim.invariance import ASPECTS, examine
    from npusim.report.invariance import invariance_document, invariance_table

    required, varied = (_names(text, option, ASPECTS) for text, option in ((require, "--require"), (vary, "--vary")))
    if varied and (missing := [name for name in required if name not in varied]):
        raise SpecError(f"--require {missing[0]}: it is not among --vary {','.join(varied)}")
    with progress(f"varying {request.schedule}") as advance:
        found = examine(request, varied or required or ASPECTS, advance)
    if json:
        show_json(invariance_document(found, required))
    else:
        show(invariance_table(found))
    broken = [name for name in required if not found.holds(name)]
    if broken:
        raise CheckFailedError(f"bits change with {', '.join(broken)}")


def _names(text: str, option: str, known: tuple[str, ...]) -> tuple[str, ...]:
    found = o.names(text, option) if text else ()
    for name in found:
        if name not in known:
            raise SpecError(f"{option} {name}: there are {', '.join(known)}")
    return found
