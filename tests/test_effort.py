"""A run says what it would cost before it starts, and how far it is while it lasts."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from npusim import run
from npusim.cli import console
from npusim.cli.app import app
from npusim.config.problem import Problem
from npusim.errors import SpecError
from npusim.library import find_schedule
from npusim.simulation import simulate
from npusim.simulation.plan import estimate
from npusim.units import format_duration

if TYPE_CHECKING:
    from pathlib import Path


def _estimate(seq: int, method: str = "auto", rows: Any = None, **kind: Any) -> dict[str, float]:
    problem = Problem(heads=4, seq_q=seq, head_dim=128, **kind)
    tiling = find_schedule("flash", "ascend").tiling()
    return dict(estimate(problem, tiling, method, None if rows is None else (rows, "all")))


def test_the_estimate_is_of_the_size_of_what_it_takes() -> None:
    problem = Problem(heads=2, seq_q=512, head_dim=128)
    tiling = find_schedule("flash", "ascend").tiling()
    run("flash", problem=problem, rows="all", trace_groups=())  # what is compiled once
    for numerics, method in ((True, "auto"), (False, "des")):
        start = time.process_time()
        rows = "all" if numerics else "sample"
        run("flash", problem=problem, rows=rows, trace_groups=(), method=method, numerics=numerics)
        took = time.process_time() - start
        told = sum(estimate(problem, tiling, method, ("all", "all") if numerics else None).values())
        assert 1 / 20 < told / took < 20, (told, took)


def test_it_grows_with_what_is_asked_for() -> None:
    assert _estimate(8192, rows="all")["bits"] == pytest.approx(4 * _estimate(4096, rows="all")["bits"])
    assert _estimate(4096, rows="all", causal=True)["bits"] < 0.51 * _estimate(4096, rows="all")["bits"]
    assert _estimate(4096, rows="sample")["bits"] == pytest.approx(_estimate(4096, rows="all")["bits"] / 32)
    assert _estimate(4096, rows=[0, 1, 127, 128])["bits"] == pytest.approx(2 * _estimate(4096, rows="sample")["bits"])
    assert "bits" not in _estimate(4096)
    assert _estimate(4096, "des")["time"] > 10 * _estimate(4096, "block")["time"] > 0
    assert _estimate(4096)["time"] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--seq", "64k", "--rows", "all"),
            "about 57 min (an estimate; its bits 100 % of it), more than 10 min; "
            "to reduce it: --rows sample, --heads, or --no-numerics; to run it anyway: --force",
        ),
        (("--seq", "1M", "--method", "des", "--no-numerics"), "about 17.5 h (an estimate; its time 100 % of it)"),
        (("--seq", "1000000000000", "--no-numerics"), "to reduce it: fewer or shorter sequences (--batch, --seq)"),
        (("--batch", "9007199254740992"), "years (an estimate"),
    ],
)
def test_beyond_ten_minutes_a_run_wants_force(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["run", "flash", "--no-save", *arguments])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert message in result.stderr


def test_force_and_python_set_no_limit() -> None:
    sizes: dict[str, Any] = {"seq": 64, "numerics": False, "trace_groups": ()}
    with pytest.raises(SpecError, match=r"more than 1\.00 us"):
        run("flash", limit_s=1e-6, **sizes)
    assert run("flash", **sizes).cycles > 0
    forced = CliRunner().invoke(app, ["run", "flash", "--seq", "64", "--no-numerics", "--no-save", "--force"])
    assert forced.exit_code == 0


def test_bits_and_des_say_how_much_is_done() -> None:
    for options in ({"rows": "all"}, {"numerics": False, "method": "des"}):
        shares: list[float] = []
        run("flash", seq=256, trace_groups=(), progress=shares.append, **options)  # type: ignore[arg-type]
        assert shares == sorted(shares)
        assert len(shares) > 1
        assert shares[0] >= 0
        assert 0.8 < shares[-1] <= 1


def test_what_takes_long_says_so_where_nobody_watches(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "FIRST_LINE_S", 0.01)
    for quiet_s, said in ((30.0, ""), (0.0, "npusim: simulating x: 50 of 100\n")):
        monkeypatch.setattr(console, "QUIET_S", quiet_s)
        with console.progress("simulating x") as advance:
            console.in_percent(advance)(0.5)
            time.sleep(0.3)
        assert capsys.readouterr().err == said


def test_what_takes_long_before_there_is_news_is_said_and_what_does_not_is_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "FIRST_LINE_S", 0.05)
    for seconds, is_told, said in ((0.2, False, "npusim: choosing a tile\n"), (0.2, True, ""), (0.0, False, "")):
        with console.said_late("choosing a tile") as is_over:
            if is_told:
                is_over()
            time.sleep(seconds)
        time.sleep(0.1)
        assert capsys.readouterr().err == said


def test_work_without_news_says_how_long_it_has_lasted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run of 10M tokens printed one line, and then nothing for 45 s."""
    for name, seconds in (("FIRST_LINE_S", 0.05), ("LINE_S", 0.1), ("TICK_S", 0.02), ("QUIET_S", 0.0)):
        monkeypatch.setattr(console, name, seconds)
    with console.said_late("choosing a tile") as go_on:
        time.sleep(0.3)
        before = capsys.readouterr().err.splitlines()
        console.in_percent(lambda *_: None, go_on, "simulating x")(0.0)
        time.sleep(0.3)
        after = capsys.readouterr().err.splitlines()
        console.in_percent(lambda *_: None, go_on, "simulating x")(0.5)
        time.sleep(0.3)
        assert capsys.readouterr().err == ""
    assert before[0] == "npusim: choosing a tile"
    assert all(re.fullmatch(r"npusim: choosing a tile: \d s so far", line) for line in before[1:])
    assert all(re.fullmatch(r"npusim: simulating x: \d s so far", line) for line in after)
    assert len(before) > 1 <= len(after)
    with console.progress("fitting") as advance:
        time.sleep(0.4)
        advance(1, 2)
        time.sleep(0.5)
    lines = capsys.readouterr().err.splitlines()
    assert {"npusim: fitting: 0 s so far", "npusim: fitting: 1 of 2"} <= set(lines)
    assert re.fullmatch(r"npusim: fitting: 1 of 2: \d s so far", lines[-1])


def test_a_run_says_that_it_chooses_a_tile_and_refuses_its_size_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(console, "FIRST_LINE_S", 0.01)
    slow = simulate.program_of
    monkeypatch.setattr(simulate, "program_of", lambda plan: (time.sleep(0.1), slow(plan))[1])
    done = CliRunner().invoke(app, ["run", "flash", "--seq", "256", "--no-numerics", "--no-save"])
    assert "npusim: choosing the" in done.stderr
    done = CliRunner().invoke(app, ["run", "flash", "--seq", "100M", "--no-save"])
    assert done.exit_code == 2
    assert "this run would take about" in done.stderr
    assert "choosing" not in done.stderr


def test_durations_have_readable_units() -> None:
    seconds = (1e-7, 2.5, 120, 600, 3600, 7200, 5e5)
    assert [format_duration(s) for s in seconds] == [
        "100.0 ns",
        "2.50 s",
        "120.00 s",
        "10 min",
        "60 min",
        "2.0 h",
        "5.8 days",
    ]


@pytest.mark.parametrize(
    ("done", "total", "seconds", "known", "words"),
    [
        (25, 100, 10.0, None, "about 30 s left"),
        (1, 100, 100.0, None, "about 2.8 h left"),
        (25, 100, 10.0, 7.2, "about 7 s left"),
        (0, 100, 10.0, None, ""),
        (100, 100, 10.0, None, ""),
        (25, 100, 0.5, None, ""),
    ],
)
def test_progress_states_the_time_left(done: int, total: int, seconds: float, known: float | None, words: str) -> None:
    assert console._time_left(done, total, seconds, known) == words


def test_progress_prints_the_time_left_to_stderr_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, seconds in (("FIRST_LINE_S", 0.02), ("LINE_S", 0.05), ("TICK_S", 0.01), ("QUIET_S", 0.0)):
        monkeypatch.setattr(console, name, seconds)
    with console.progress("trying") as advance:
        time.sleep(0.1)
        advance(1, 2, left_s=3.0)
        time.sleep(0.2)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "npusim: trying: 1 of 2, about 3 s left" in printed.err
