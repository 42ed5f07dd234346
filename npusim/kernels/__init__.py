"""Kernels before a machine: `form` traces functions on tiles, `declare` makes schedules, `triton` reads Triton's."""
