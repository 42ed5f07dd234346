"""Kernels without a machine: `form` traces functions on tiles, `declare` defines schedules, `triton` reads TTIR."""
