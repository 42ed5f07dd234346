"""``npusim tune``: the best configuration of a kernel, predicted, and which configurations give the same bits."""

import json as json_text
import os
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from npusim.cli import completion
from npusim.cli import options as o
from npusim.cli.console import late_progress, show, show_json, write
from npusim.cli.help import Verbs
from npusim.errors import TilingError
from npusim.simulation.request import CallOptions, Request, short_name

if TYPE_CHECKING:
    from npusim.config.problem import AnyProblem

app = Verbs()
Fields = Annotated[
    list[str] | None,
    o.option(
        "--field -f FIELD=VALUES",
        "Values to try in place of the kernel's own configurations: BM=64,128; repeat for a grid.",
        autocompletion=completion.tiling,
    ),
]
Shapes = Annotated[
    list[str] | None, o.option("--sizes NAME=N,...", "Sizes of several shapes: --sizes M=512,4k; repeat for a grid.")
]
Bits = Annotated[
    str,
    o.option("--bits WHICH", "any; same: the class of the first configuration; or a class in the table, such as A."),
]
Top = Annotated[int, o.option("--top K", "Number of configurations in the table.", min=1)]
Jobs = Annotated[int | None, o.option("--jobs -j N", "Number of processes.", shown="all CPUs", min=1)]
Out = Annotated[Path | None, o.option("-o FILE", "Write the best configuration of each shape as JSON.")]


@app.verb(
    "tune",
    (
        "npusim tune 'mm.py::mm[cdiv(M, BM)](...)' --problem M=4k,N=4k,K=4k --hw h100",
        "configurations of the kernel's own @triton.autotune",
    ),
    ("npusim tune flash --hw h200 -f block_q=64,128 -f block_kv=64,128 -f warps=4,8", "of a packaged schedule"),
    first="--field --problem --hw --workload --seq --json",
)
@o.takes(CallOptions)
def tune(
    request: Request,
    *,
    fields: Fields = None,
    sizes: Shapes = None,
    bits: Bits = "any",
    top: Top = 10,
    jobs: Jobs = None,
    out: Out = None,
    json: o.Json = False,
) -> None:
    """Rank a kernel's configurations by predicted time, with their classes of equal bits, without the hardware.

    Times are those of the cores in a stream of launches, with L2 in its steady state unless --l2 names another. Classes
    are proved from the structure: configurations with the same letter give the same bits for finite inputs.
    """
    from npusim.report.tuning import Tuning, tuning_document, tuning_table
    from npusim.simulation.ranking import steady
    from npusim.studies.explore.space import parse_field
    from npusim.studies.tune.configurations import configurations_of
    from npusim.studies.tune.prediction import predict_all

    device, axes = request.machine(), dict(map(parse_field, fields or ()))
    request = replace(request, l2=steady(request.l2, device))
    shapes, tunings = dict(map(parse_field, sizes or ())), []
    for values in product(*shapes.values()):
        shape = {n: _whole(n, v) for n, v in zip(shapes, values, strict=True)}
        configurations = configurations_of(replace(request, **_changes(request.problem, shape)), axes)
        name = short_name(request.schedule)
        with late_progress(f"tuning {name}") as advance:
            predictions = predict_all(configurations, jobs or os.cpu_count() or 1, advance)
        if all(p.us is None for p in predictions):
            raise TilingError(f"{name}: no configuration has a time: {predictions[0].reason}")
        words = " ".join(f"{n}={v}" for n, v in shape.items())
        tunings.append(Tuning(name, words, device.name, configurations, predictions, bits))
    if json:
        show_json(tuning_document(tunings))
    else:
        for tuning in tunings:
            show(tuning_table(tuning, top))
    if out is not None:
        write(out, f"{json_text.dumps([t.pick() for t in tunings], indent=1)}\n")


def _whole(name: str, value: object) -> int:
    from npusim.units import parse_count

    try:
        return parse_count(str(value))
    except ValueError:
        raise TilingError(f"--sizes {name}={value}: write whole numbers: 4096, 4k") from None


def _changes(own: "AnyProblem | None", shape: dict[str, int]) -> dict[str, Any]:
    """Return the fields of a request that a shape changes: sizes of its problem, or of attention's."""
    if own is None or not shape:
        return dict(shape)
    return {"problem": own.resized(shape)}
