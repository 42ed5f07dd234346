"""The command ``npusim``.

Verbs of one kind share a module; ``app`` combines them and turns errors into exit codes, ``options`` has the options
that several verbs share, ``console`` is the only module that prints.  No module here imports numpy before a verb needs
it, so that ``npusim --help`` answers immediately.
"""

from __future__ import annotations

import gc
import os
import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line; ends the process with exit code 0, 1, 2 or 130."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # The caller closed the stream (>&-).  A new file gets the lowest free number, which is this stream's
            # number.
            nowhere = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(nowhere, True)  # so that workers have a stream too
            setattr(sys, name, os.fdopen(nowhere, mode, encoding="utf-8"))
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")  # a search for plugins took a thirtieth of a run
    gc.set_threshold(1_000_000)  # modules and programs live long: repeated garbage collections took a tenth of a run
    try:
        from npusim.cli.app import app

        app()
    except KeyboardInterrupt:  # outside of all verbs; verbs report it themselves
        sys.stderr.write("npusim: interrupted\n")
        sys.exit(130)
    except OSError as error:  # while help is printed, before any verb is called: a full disk
        sys.exit(f"npusim: error: {error.strerror or error}")
    finally:
        # the library's bindings (nanobind, from 3.9 on) report each frozen object as a leak
        if "triton" not in sys.modules:
            gc.freeze()  # the process ends: no objects need to be examined
