"""The command ``npusim``.

One module a verb; ``app`` puts them together and turns errors into exit codes, ``options`` holds
what several verbs share, ``console`` is the only place that prints.  Nothing here imports numpy
before a verb needs it: ``npusim --help`` answers at once.
"""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line; ends the process with exit code 0, 1, 2 or 130."""
    try:
        from npusim.cli.app import app

        app()
    except KeyboardInterrupt:  # outside of any verb: those say so themselves
        sys.stderr.write("npusim: interrupted\n")
        sys.exit(130)
