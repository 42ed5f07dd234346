"""A launch whose results are compared with values in float64, tensor by tensor."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

import npusim
from ttir.test_engines import CLOSE

if TYPE_CHECKING:
    from collections.abc import Mapping


def checked(
    module: str,
    kernel: str,
    grid: tuple[int, ...],
    words: dict[str, Any],
    wanted: Mapping[str, Any],
    hw: str,
    *,
    close: float = 0.0,
) -> Any:
    """Run a launch of a kernel of a module on a device; return the run.

    Each tensor is near its values in float64, or equal where it has integers, and is stored where these are numbers.
    ``close``: the largest relative error, by default that of the tensor's format.
    """
    from ttir.stored import stored

    with npusim.record(floats=True) as calls:
        getattr(import_module(f"ttir.{module}"), kernel)[grid](**words)
    done = npusim.run(calls[0], hw=hw, rows="all")
    made = stored(done, words)
    for name, values in wanted.items():
        right = np.asarray(values, np.float64)
        assert np.array_equal(np.isnan(made[name]), np.isnan(right)), name
        seen = ~np.isnan(right)
        if np.asarray(words[name]).dtype.kind in "iub":
            assert np.array_equal(made[name][seen], right[seen]), name
            continue
        error = np.sqrt(((made[name][seen] - right[seen]) ** 2).sum() / (right[seen] ** 2).sum())
        assert error < (close or CLOSE[str(words[name].dtype)]), (name, error)
    return done
