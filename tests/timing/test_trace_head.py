"""The beginning of a program alone, against the same operations of the whole."""

from __future__ import annotations

import pytest

from npusim.errors import SpecError
from npusim.program.timing import auto, trace_head
from npusim.program.timing.stream import Streams
from npusim.program.timing.trace_head import first_spans
from npusim.run import run

pytestmark = pytest.mark.usefixtures("declared_tiles")


@pytest.mark.parametrize(
    ("schedule", "options", "until"),
    [
        ("flash", {"seq": 2048}, 20_000),
        ("pasa", {"seq": 4096}, 15_000),
        pytest.param("pasa", {"seq": 4096}, 60_000, marks=pytest.mark.exhaustive),
        ("volta_flash", {"seq": 4096, "batch": 4}, 20_000),
    ],
)
def test_first_operations_are_those_of_the_whole_run(schedule: str, options: dict[str, int], until: int) -> None:
    timing = run(schedule, numerics=False, method="fold", trace_groups=(0, 3), **options).timing  # type: ignore[arg-type]
    result = run(schedule, numerics=False, trace_groups=(), **options)  # type: ignore[arg-type]
    assert timing is not None
    spans, known = first_spans(Streams(result.program, result.device), (0, 3), until)
    assert until <= known < timing.cycles, "a part"
    assert set(spans) == {s for s in timing.spans if max(s.end, s.done) <= known}


def test_long_run_has_its_beginning_and_refuses_what_would_take_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "FEW_OPERATIONS", 100)
    long = {"numerics": False, "tiling": {"block_kv": 64}}
    monkeypatch.setattr(trace_head, "ENOUGH_SPANS", 300)
    result = run("flash", seq=2048, trace_groups=(0,), **long)  # type: ignore[arg-type]
    timing = result.timing
    assert timing is not None
    assert timing.traced_cycles is not None
    assert 300 <= len(timing.spans) < timing.operations
    assert any(note.startswith("timeline: the first ") for note in result.notes)
    further = run("flash", seq=2048, trace_groups=(0,), timeline=(0.0, 30.0), **long).timing  # type: ignore[arg-type]
    assert further is not None
    assert further.traced_cycles is not None
    assert further.traced_cycles > 30e-6 * timing.clock_hz
    for most, least in ((15_000, 300), (1000, 0)):  # some of the beginning, or none of it
        monkeypatch.setattr(trace_head, "MOST_OPERATIONS", most)
        timing = run("flash", seq=2048, trace_groups=(0,), **long).timing  # type: ignore[arg-type]
        assert timing is not None
        assert least <= len(timing.spans) <= least * 1.01  # more end in the same cycle
    with pytest.raises(SpecError, match=r"window up to 30\.00 us: more than 1,000 operations"):
        run("flash", seq=2048, trace_groups=(0,), timeline=(0.0, 30.0), **long)  # type: ignore[arg-type]
