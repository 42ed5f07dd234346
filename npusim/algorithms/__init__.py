"""Algorithms: tables of primitive steps with their products, in named stages, phase by phase.

No queue, pipe or buffer appears here; `npusim.machines` runs the same phases on a core family.
"""
