"""Tuning without a stopwatch: times of configurations, and which of them are the same function.

`configurations` reads what a kernel's author would try, `classes` says which give the same bits whatever the inputs,
`prediction` gives times; `hooks` are what Triton's autotuner calls.
"""
