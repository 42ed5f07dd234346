"""``npusim stress``: the inputs with the largest errors, the first wrong step, and formats with which the errors are
small.
"""

import math
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from npusim.cli import options as o
from npusim.cli.console import progress, show_either, write
from npusim.cli.help import Verbs
from npusim.errors import CheckFailedError, SpecError
from npusim.simulation.request import BitsOptions, Request, command, short_name

app = Verbs()
#: Options of a search that are omitted from the run of its worst input: the stored input determines the sizes, and the
#: run names the tile.
_OF_TENSORS = ("--seq", "--seq-q", "--seq-kv", "--batch", "--phase", "--dtype", "--lengths", "-w", "-t")


@app.verb(
    "stress",
    ("npusim stress flash --seq 1k", "all aspects, within default bounds"),
    ("npusim stress flash --seq 1k --precision fa16_32 --over resonance=-64:64", "one aspect, within yours"),
    ("npusim stress fp8_attention --hw h200 --seq 1k --over sinks,logit_std=0.25:2", "two of them"),
    ("npusim stress mine.py:mine --seq 1k --require max-rmse=0.001", "a test for your CI"),
    first="--over --budget --require --workload --seq --hw --precision --json",
)
@o.takes(BitsOptions, "numerics", own_first=True)
def stress(
    request: Request,
    *,
    over: Annotated[
        list[str] | None,
        o.option(
            "--over ASPECT[=LOW:HIGH]",
            "Aspects to vary: logit_std, logit_mean, resonance, channels, tokens, sinks, late, values, equal, "
            "zero, tail, padding, scale, or outliers, logits; may be repeated. =a,b,c are values.",
            panel="How",
            shown="all",
        ),
    ] = None,
    budget: Annotated[float, o.option("--budget SECONDS", "When to stop.", panel="How")] = 30.0,
    require: Annotated[
        str,
        o.option(
            "--require finite|max-rmse=X",
            "Exit code 1 if the worst input violates this condition; finite extends the default bounds.",
            panel="How",
            shown=False,
        ),
    ] = "",
    jobs: Annotated[int, o.option("--jobs -j N", "Number of processes that compute.", panel="How")] = 1,
    out: Annotated[
        Path | None,
        o.option(
            "--out -o FILE", "File (.safetensors) to which to write the worst input.", panel="Output", shown="in runs/"
        ),
    ] = None,
    plot: o.Plot = None,
    json: o.Json = False,
) -> None:
    """Search for the inputs on which a schedule is furthest from float64, and name the step where the error begins.

    Accuracy counts as lost if the error is more than twice that on calm inputs: few keys, none hidden, scores close
    together. The same seed tests the same inputs in the same order; with a budget that is sufficient for all of them,
    the result is the same on every machine.
    """
    from npusim.report.output import RUNS, check_file_writable, tensor_bytes
    from npusim.report.plot import picture
    from npusim.report.worst_inputs import errors_figure, scores_figure, stress_document, stress_table
    from npusim.studies.stress import examine

    allowed = _allowed(require)
    if out is not None:
        check_file_writable(out)  # before the work, not after it
    # A comma is followed by another aspect, or by another value.
    aspects = [part for text in over or () for part in re.split(r",(?=[a-z])", text)]
    with progress(f"searching inputs for {short_name(request.schedule)}") as advance:
        is_finite = require == "finite"
        result = examine(request, aspects, is_finite=is_finite, budget_s=budget, jobs=jobs, progress=advance)
    file = out or RUNS / f"{result.name}-stress.safetensors"
    write(file, tensor_bytes(result.inputs, {"worst": str(result.worst), "seed": str(result.seed)}))
    asked = [pair for pair in replace(request, tensors=None).asked() or () if pair[0] not in _OF_TENSORS]
    tile = [("-t", result.tile)] if result.tile else []
    again = command("run", request.schedule, [*asked, *tile, ("--tensors", str(file))], ())
    is_met = result.worst.badness <= allowed
    required = {require: is_met} if require else {}
    show_either(json, lambda: stress_document(result, again, required), lambda: stress_table(result, again))
    if plot is not None:
        write(plot, picture([errors_figure(result)], plot.suffix))
        if (scores := scores_figure(result)) is not None:
            write(plot.with_stem(f"{plot.stem}-scores"), picture([scores], plot.suffix))
    if not is_met:
        raise CheckFailedError(f"{require}: {result.worst}")


def _allowed(require: str) -> float:
    """Return the largest error that a requirement allows; without a requirement, any error is allowed."""
    name, _, text = require.partition("=")
    if name == "max-rmse":
        return o.numbers(text, "--require max-rmse", "an error, such as 0.001", lambda x: len(x) == 1 and x[0] >= 0)[0]
    if require not in ("", "finite"):
        raise SpecError(f"--require {require}: write finite, or max-rmse=X")
    return sys.float_info.max if require else math.inf
