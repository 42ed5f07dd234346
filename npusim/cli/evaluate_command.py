"""``npusim evaluate``: whether kernels are right, their bits, their times, and whether to trust the times."""

import os
import re
from pathlib import Path
from typing import Annotated

from npusim.cli import options as o
from npusim.cli.console import say, show_either
from npusim.cli.help import Verbs
from npusim.errors import CheckFailedError, SpecError, absent
from npusim.simulation.request import DEFAULT_HW, CallOptions, Request, short_name

app = Verbs()


@app.verb(
    "evaluate",
    ("npusim evaluate flash --hw h200 --seq 512", "a packaged kernel: right, and its time with a band"),
    ("npusim evaluate mine.py:mine --with other.py:other --hw h200,a100", "two candidates"),
    ("npusim evaluate mine.py:mine --reference ref.py:attention --hw h200 --seq 512", "against a numpy function"),
    first="--with --reference --hw --seq --workload --json",
)
@o.takes(CallOptions)
def evaluate(
    request: Request,
    *,
    others: Annotated[
        list[str] | None, o.option("--with KERNEL", "Another candidate to judge; may be repeated.")
    ] = None,
    reference: Annotated[
        str | None,
        o.option(
            "--reference KERNEL|FILE.py:FUNCTION",
            "Kernel or function that gives the right result; a function gets float64 arrays.",
            shown="packaged attention",
        ),
    ] = None,
    sizes: Annotated[
        list[str] | None,
        o.option("--sizes NAME=N,...", "Sizes of a further call to judge: --sizes seq_q=100,seq_kv=300."),
    ] = None,
    draw: Annotated[int, o.option("--draw SEED", "Seed of the drawn inputs.")] = 0,
    seconds: Annotated[float, o.option("--seconds S", "Time limit for each answer of a candidate.")] = 120.0,
    gib: Annotated[float, o.option("--memory GIB", "Limit for the memory of a candidate.")] = 8.0,
    store: Annotated[
        Path | None, o.option("--store FILE", "File (JSON lines) of finished candidates, which the next call reads.")
    ] = None,
    jobs: Annotated[int | None, o.option("--jobs -j N", "Candidates at once.", shown="all CPUs", min=1)] = None,
    json: o.Json = False,
) -> None:
    """Judge kernels in one call: right or wrong, the same bits or not, how fast, and whether to trust the time.

    Each candidate runs in a process with limits of time, memory, files and network. It is judged on calls that it does
    not know: other values, other sizes, extremes. Exit code 1 if one is wrong.
    """
    from dataclasses import replace

    from npusim.report.evaluated import evaluated_document, evaluated_table
    from npusim.studies.evaluate.evaluation import Batch
    from npusim.studies.evaluate.limits import Limits

    devices = str(request.hw or DEFAULT_HW).split(",")
    names = (request.schedule, *(others or ()))
    for file in filter(None, (re.match(r".+?\.py(?=:|$)", name) for name in names)):
        if not Path(file[0]).is_file():
            raise SpecError(
                f"{Path(file[0]).absolute()}: {absent(Path(file[0]))}; a candidate is FILE.py:NAME, or a kernel's name"
            )
    requests = [replace(request, schedule=name, hw=None, seed=draw) for name in names]
    shapes = tuple(
        {n: o.count("--sizes")(x) for n, x in o.key_values(text.split(","), "--sizes").items()} for text in sizes or ()
    )
    batch = Batch(requests, reference, devices, shapes, Limits(seconds, int(gib * 2**30)), store)
    done = batch.run(jobs or os.cpu_count() or 1, lambda e: say(f"{short_name(e.kernel)}: {e.verdict}"))
    show_either(json, lambda: evaluated_document(done), lambda: evaluated_table(done))
    if wrong := [short_name(e.kernel) for e in done if e.verdict == "wrong"]:
        raise CheckFailedError(f"wrong: {', '.join(wrong)}")
