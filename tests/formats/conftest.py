"""Where the golden files lie, and the operand families every matrix unit is tested on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

GOLDEN = Path(__file__).resolve().parents[2].parent / "shared" / "golden"


@pytest.fixture(scope="session")
def golden() -> Callable[[str], Path]:
    """Return the path of a golden file, or skip the test with the reason."""

    def path(name: str) -> Path:
        file = GOLDEN / name
        if not file.is_file():
            pytest.skip(f"golden file {file} is not here")
        return file

    return path


@pytest.fixture(scope="session")
def unary_golden(golden: Callable[[str], Path]) -> Any:
    """Return the arrays of unary.npz."""
    return np.load(golden("unary.npz"), allow_pickle=False)
