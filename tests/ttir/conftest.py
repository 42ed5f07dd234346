"""What tests of Triton kernels start from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from npusim.kernels.triton import compiler, latest_readings
from npusim.machines.sm import compiled_loops, compiled_rows

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module", autouse=True)
def bits_that_are_held(own_bits_alone: None) -> None:
    """No test of Triton kernels holds the bits of alternatives to assumed arithmetic."""


@pytest.fixture(autouse=True)
def changed_code_reads_anew(request: pytest.FixtureRequest) -> None:
    """A test that replaces a part of the reader has none of the readings that earlier runs stored."""
    if "monkeypatch" in request.fixturenames:
        request.getfixturevalue("monkeypatch").setattr(latest_readings, "MOST_PROGRAMS", 0)


@pytest.fixture(scope="module")
def without_warp_code() -> Iterator[None]:
    """Results of Triton's compiler lack the instructions of a warp, for tests that hold no GPU's time of a kernel.

    These instructions are of the time alone, and ``nvdisasm`` takes a third of a second for each kernel, which is more
    than all else that such a test does.  The results are stored apart from complete ones.
    """
    stamp = (*compiler._reading(), "no instructions of a warp")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(compiler, "_reading", lambda: stamp)
        patched.setattr(compiled_rows, "has_body", lambda *_: False)
        patched.setattr(compiled_loops, "has_loops", lambda *_: False)
        yield
