"""Tuning by prediction: times of configurations, and classes of configurations that compute the same function.

`configurations` reads the configurations of a kernel's author, `prediction` gives times and classes of equal bits
(`npusim.simulation.classes`); Triton's autotuner calls `hooks`.
"""
