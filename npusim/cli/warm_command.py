"""``npusim warm``: compile code for usual runs ahead of time."""

from npusim.cli import options as o
from npusim.cli.console import progress, say, show_json, show_lines
from npusim.cli.help import Verbs
from npusim.report.text import document

app = Verbs()


@app.verb("warm", ("npusim warm", "once, when a container is built or before CI's jobs"))
def warm(json: o.Json = False) -> None:
    """Compile code for usual runs into the cache folder, so that a first run is as fast as later ones.

    NPUSIM_CACHE names the folder; without it, it is the package's __pycache__, or the user's cache folder.  A wheel may
    contain code for any processor of its kind; this command compiles for this processor, and its code is faster.
    """
    from npusim import cache
    from npusim.formats import shipped
    from npusim.simulation.warm import warm

    with shipped.compiling_natively(), progress("compiling") as advance:
        runs = []
        for run, count in warm():
            runs.append(run)
            advance(len(runs), count)
    folder = cache.folder()
    if json:
        show_json(document("warm", folder=None if folder is None else str(folder), runs=runs))
    elif folder is None:
        say("npusim stores nothing: it cannot write a cache folder")
    else:
        show_lines([[(f"{len(runs)} runs compiled; machine code is stored in {folder}", "")]])
