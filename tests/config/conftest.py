"""Small files to load, and the error that a bad one gives."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from npusim.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes text to a file of the test's folder."""

    def write_file(text: str, name: str = "mine.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write_file


@pytest.fixture
def fault() -> Callable[..., str]:
    """Return a function that calls another and returns the message of its `SpecError`."""

    def message(call: Callable[..., object], *args: object, **kwargs: object) -> str:
        with pytest.raises(SpecError) as caught:
            call(*args, **kwargs)
        return str(caught.value)

    return message
