"""Where each name of a phase lives, as far as the algorithm says: who writes it, and who reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from npusim.algorithms.phase import BySize, tensor_of
from npusim.errors import ProgramError
from npusim.ir.op import Opcode

if TYPE_CHECKING:
    from collections.abc import Mapping

    from npusim.algorithms.phase import Phase, Stacked
    from npusim.ir.tile import GlobalTensor

#: ``global``: an operand.  ``down``: a product writes it, rows read it.  ``up``: rows write it, a
#: product reads it.  ``out``: a result.  ``state``: lives as long as the cell.  ``carried``: from one
#: rows stage to another of the same tile.  ``work``: within a stage.  ``mask``: cut from a constant.
Place = Literal["global", "down", "up", "out", "state", "carried", "work", "mask"]


def flow(phase: Phase) -> dict[str, Place]:
    """Return the place of every name; a machine's routes turn it into storage.

    What is bound to a tensor is global or out, whatever its role.  Raises `ProgramError` for an input or mask
    that a stage writes, for operands and results bound to no tensor, and for names nobody declared.
    """
    stages, names, places = phase.stages, phase.names, dict[str, Place]()
    _check_declared(phase)
    for n, what in names.items():
        writers = [s for s in stages if n in s.written]
        readers = [s for s in stages if n in s.read]
        bound = phase.tensors.get(n)
        if writers and (n in phase.masks or (bound is not None and not _may_be_written(bound))):
            raise ProgramError(f"{phase.name}: stage {writers[0].name} writes {n}, which is an input")
        if bound is None and what.role in ("operand", "result"):
            raise ProgramError(f"{phase.name}: {what.role} {n} is bound to no tensor")
        if n in phase.masks:
            places[n] = "mask"
        elif bound is not None:
            places[n] = "out" if writers else "global"
        elif what.start is not None:
            places[n] = "state"
        elif any(s.is_product for s in writers):
            places[n] = "down"
        elif any(s.is_product for s in readers):
            places[n] = "up"
        elif any(s not in writers for s in readers):
            places[n] = "carried"
        else:
            places[n] = "work"
    return places


def _may_be_written(bound: GlobalTensor | BySize | Stacked) -> bool:
    return not isinstance(bound, BySize) and tensor_of(bound).role in ("output", "workspace")


def _check_declared(phase: Phase) -> None:
    for stage in phase.stages:
        for n in stage.written:
            if n not in phase.names:
                raise ProgramError(f"{phase.name}: stage {stage.name} writes {n!r}, which is no name of the phase")


def storage(phase: Phase, places: Mapping[str, Place]) -> dict[str, str]:
    """Return ``{name: name whose storage it shares}``.

    Names that a cast between equal formats joins are one place, called after the one that outlives
    the stage; between two such names the cast stays, as a copy.
    """
    formats = {n: what.fmt for n, what in phase.names.items()}
    chosen = {n: n for n in formats}
    for r in (r for s in phase.stages if not s.is_product for r in s.rows):
        if r.opcode is not Opcode.CAST or formats[r.dst] != formats[r.srcs[0]]:
            continue
        dst, src = chosen[r.dst], chosen[r.srcs[0]]
        if places[dst] != "work" and places[src] != "work":
            continue
        keep, drop = (dst, src) if places[dst] != "work" else (src, dst)
        chosen = {n: keep if c == drop else c for n, c in chosen.items()}
    for n, what in phase.names.items():
        if what.over and chosen[n] == n and formats[n] == formats[what.over]:
            chosen = {k: chosen[what.over] if c == n else c for k, c in chosen.items()}
    return chosen
