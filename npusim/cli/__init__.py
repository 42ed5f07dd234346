"""The command ``npusim``.

Verbs of one kind share a module; ``app`` puts them together and turns errors into exit codes, ``options`` holds
what several verbs share, ``console`` is the only place that prints.  Nothing here imports numpy
before a verb needs it: ``npusim --help`` answers at once.
"""

from __future__ import annotations

import os
import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line; ends the process with exit code 0, 1, 2 or 130."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # Closed by whoever started us (>&-). What is opened gets the lowest number that is free: that one.
            nowhere = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(nowhere, True)  # so that workers have one too
            setattr(sys, name, os.fdopen(nowhere, mode, encoding="utf-8"))
    try:
        from npusim.cli.app import app

        app()
    except KeyboardInterrupt:  # outside of any verb: those say so themselves
        sys.stderr.write("npusim: interrupted\n")
        sys.exit(130)
    except OSError as error:  # of the help, which is printed before a verb is called: a full disk
        sys.exit(f"npusim: error: {error.strerror or error}")
