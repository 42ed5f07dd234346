"""Tests that one release of Triton alone can pass."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

import pytest


def _number() -> tuple[int, ...]:
    try:
        return tuple(int(n) for n in re.findall(r"\d+", version("triton"))[:2])
    except PackageNotFoundError:
        return (0, 0)


needs_block_pointers = pytest.mark.skipif(_number() >= (3, 9), reason="Triton 3.9 has no block pointers")
as_measured = pytest.mark.skipif(_number() != (3, 6), reason="of the code that was measured: Triton 3.6's")
