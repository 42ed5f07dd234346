"""Results as pandas' frames, if pandas is installed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from npusim.errors import NpusimError

__all__ = ["frame"]


def frame(rows: Iterable[Mapping[str, object]]) -> Any:
    """Return a `pandas.DataFrame` of rows, with one column per key; raise `NpusimError` if pandas is not installed."""
    try:
        import pandas
    except ImportError:
        raise NpusimError("to_pandas needs pandas: python -m pip install pandas") from None
    return pandas.DataFrame(list(rows))
