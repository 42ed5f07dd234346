"""Streaming multiprocessors, Volta to Hopper: warps, registers, shared memory, tensor cores."""

from npusim.machines.sm.machine import SmMachine
from npusim.machines.sm.plan import SmTiling

__all__ = ["SmMachine", "SmTiling"]
