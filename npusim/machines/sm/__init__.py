"""Streaming multiprocessors, Volta to Hopper: warps, registers, shared memory, tensor cores."""
