"""Tuning without a stopwatch: times of configurations, and which of them are the same function.

`configurations` reads what a kernel's author would try, `prediction` gives times and classes of equal bits
(`npusim.simulation.classes`); `hooks` are what Triton's autotuner calls.
"""
