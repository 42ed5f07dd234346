"""What a recorded launch stores, all of its results by parameter, in their own shapes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

import npusim
from npusim.kernels.triton.tensor_axes import GatheredView, View
from npusim.program.numerics.executor import POISON, execute
from npusim.program.numerics.input_tensors import kernel_source

if TYPE_CHECKING:
    from collections.abc import Mapping


def stored(result: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of every tensor that a run stores to, NaN where no program does; ``given``: all tensors."""
    tensors = list(result.program.tensors.values())
    done = execute(result.program, kernel_source([t for t in tensors if t.role == "input"], 0, given))
    made: dict[str, Any] = {}
    outputs = [t for t in tensors if t.role == "output"]
    for t in outputs:
        of, is_part = given[t.view.parameter], sum(x.view.parameter == t.view.parameter for x in outputs) > 1
        whole = made.setdefault(t.view.parameter, np.full(of.shape, np.nan))
        heads = [done.tensors.head(t, b, h) for b in range(t.batch) for h in range(t.heads)]
        places = t.view.array(np.arange(of.size).reshape(of.shape)).reshape(-1)
        raw = np.stack(heads)
        values = raw.astype(np.float64).reshape(-1)
        if is_part:  # what other parts store is of integers here no NaN
            values[(raw.reshape(-1, 1).view(np.uint8) == POISON).all(1)] = np.nan
        # An entry of a table that leads to no row has no place.
        is_stored = ~np.isnan(values) & _has_place(t.view).reshape(-1)
        whole.reshape(-1)[places[is_stored]] = values[is_stored]
    return made


def _has_place(view: Any) -> Any:
    """Return which elements of a result are of the argument's tensor."""
    if not isinstance(view, GatheredView):
        return np.ones(view.array(np.zeros(view.argument)).shape, bool)
    whole = View(view.name, view.shape, view.fmt, view.strides, sizes=view.sizes, by=view.by, groups=view.groups)
    return replace(whole, fixed=view.fixed).array(~view.leads_nowhere())


def stored_by(kernel: Any, grid: tuple[int, ...], hw: str, given: dict[str, Any], **words: Any) -> Any:
    """Record a launch with its values, run it, and return the tensors that it stores."""
    with npusim.record(floats=True) as calls:
        kernel[grid](**given, **words)
    return stored(npusim.run(calls[0], hw=hw, rows="all"), given)
