"""The program of a request as a text in another language, for people who want to read, check or change it."""

from __future__ import annotations

from dataclasses import replace
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Protocol

import npusim
from npusim.config.family import registered, resolved
from npusim.errors import SpecError
from npusim.simulation.chosen_tile import program_of
from npusim.simulation.plan import plan_of
from npusim.simulation.request import command

if TYPE_CHECKING:
    from collections.abc import Callable

    from npusim.config.device import DeviceSpec
    from npusim.program.ir.tile_program import TileProgram
    from npusim.simulation.request import Request

    class Writer(Protocol):
        """Writes a program of a core family as the text of a file."""

        def __call__(
            self,
            program: TileProgram,
            device: DeviceSpec,
            growing: tuple[str, int, int, Callable[[int], TileProgram]] | None = None,
        ) -> tuple[str, tuple[str, ...]]:
            """Return the text, and a list of what it does not state."""


#: Width of a comment in columns.
WIDTH = 118
#: The lengths of a request that may grow.
GROWING = ("seq", "seq_q", "seq_kv", "batch")


def written_program(request: Request, *, every: str = "") -> str:
    """Return the program of a request as a TileLang-Ascend file.

    ``every``: ``NAME=STEP``: this length of the problem becomes an argument of the text's function.  Raises `SpecError`
    for a device without such programs and for another length, and `ProgramError` for a program that the language does
    not state, with the operation.
    """
    plan = plan_of(request, is_bare=True)
    writer = registered(plan.device.family).written
    if not writer:
        what = f"{request.schedule} on {plan.device.name} is a program of the family {plan.device.family}"
        raise SpecError(f"--as tilelang: {what}; TileLang-Ascend is for one Ascend device")
    plan, program = program_of(plan)
    name, sign, step = every.partition("=")
    asked = request.asked()
    more = ["--as", "tilelang", *(["--every", every] if every else [])]
    made_by = f"Written by npusim {npusim.__version__}"
    if asked is not None:
        made_by += f": {command('program', request.schedule, asked, more)}"
    growing = None
    if every:
        if name not in GROWING or not sign or not step.isdecimal() or not int(step):
            raise SpecError(f"--every {every}: write NAME=STEP, for example seq_kv=128; NAME is {', '.join(GROWING)}")
        first = getattr(plan.problem, name, None)
        if not isinstance(first, int):
            raise SpecError(f"--every {every}: the problem has no {name}")
        # The tiling of the first length is used for all lengths, so that the texts differ only in lengths.
        tiling = {n: x for n, x in plan.tiling.model_dump().items() if x is not None}

        def at(length: int) -> TileProgram:
            changed: Any = {name: length, "tiling": tiling}
            longer = replace(request, **changed)
            return program_of(plan_of(longer, is_bare=True))[1]

        growing = name, first, int(step), at
    write: Writer = resolved(writer)
    text, unstated = write(program, plan.device, growing)
    comment = (f"# {line}\n" for said in (f"{made_by}.", *unstated) for line in wrap(said, WIDTH - len("# ")))
    return "".join(comment) + text
