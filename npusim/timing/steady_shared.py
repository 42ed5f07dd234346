"""What a snapshot says of transfers in flight and of warp groups at work, in the order in which they will end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from npusim.timing.block_jit import inline

if TYPE_CHECKING:
    from npusim.timing.block_machine import EngineState, Ints


@inline
def note_link(m: EngineState, link: int, moment: int, out: Ints, start: int) -> int:
    """Write down the transfers in flight, in the order in which they will end."""
    flows: int = m.link[link].flows
    n = start
    out[n] = flows
    n += 1
    if flows == 0:
        return n
    out[n] = m.link[link].updated - moment
    n += 1
    for i in range(flows):
        rest, e = m.transfer[link, i].key - m.link[link].units, m.transfer[link, i].engine
        at = n + 2 * i
        while at > n and (out[at - 2] > rest or (out[at - 2] == rest and out[at - 1] > e)):
            out[at], out[at + 1] = out[at - 2], out[at - 1]
            at -= 2
        out[at], out[at + 1] = rest, e
    return n + 2 * flows


@inline
def note_room(m: EngineState, member: int, moment: int, out: Ints, start: int) -> int:
    """Write down the work under way on a core, in the order in which it will end."""
    room, n = m.room[member], start
    out[n], out[n + 1] = room.count0, room.count1
    n += 2
    if room.count0 + room.count1 == 0:
        return n
    out[n] = room.updated - moment
    n += 1
    for kind in range(2):
        count, units = (room.count1, room.units1) if kind else (room.count0, room.units0)
        for i in range(count):
            rest, e = m.work[2 * member + kind, i].key - units, m.work[2 * member + kind, i].engine
            at = n + 2 * i
            while at > n and (out[at - 2] > rest or (out[at - 2] == rest and out[at - 1] > e)):
                out[at], out[at + 1] = out[at - 2], out[at - 1]
                at -= 2
            out[at], out[at + 1] = rest, e
        n += 2 * count
    return n
