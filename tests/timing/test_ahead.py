"""The engine's kernel, compiled before anyone needs it: by the same types, and only where it is not there."""

from __future__ import annotations

from npusim.run import run
from npusim.timing.ahead import compile_engine, compiled_meanwhile
from npusim.timing.steady_kernel import run_steady


def test_what_is_compiled_ahead_is_what_a_run_takes() -> None:
    run("flash", numerics=False, seq=256)
    compiled = run_steady.is_missing.args[0]  # type: ignore[attr-defined]
    taken = list(compiled.signatures)
    compile_engine()
    assert compiled.signatures == taken
    with compiled_meanwhile() as wait:
        assert wait is None
