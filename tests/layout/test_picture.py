"""`npusim layout`: words in a pipe, colours on a terminal, JSON, exit codes."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from npusim.cli.app import app
from npusim.formats.layout.fragment import arrangement
from npusim.formats.layout.instruction import instruction
from npusim.report.layouts import chain_picture, fragment_picture, picture_lines

REPOSITORY = Path(__file__).resolve().parents[2]


def ok(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["layout", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_every_element_is_drawn_once_with_lane_and_value() -> None:
    text = ok("m8n8k4", "--acc", "f16")
    lines = text.splitlines()
    assert lines[3].split() == ["0", *(f"T0V{v}" for v in range(8))]
    assert lines[7].split() == ["4", *(f"T16V{v}" for v in range(8))]
    assert "(8,8):(1,8)" in text
    assert "\x1b" not in text


def test_a_chain_says_what_must_move() -> None:
    text = ok("m8n8k4", "--acc", "f32", "--chain")
    row = "0 T0V0 T0V1 T2V0>T0 T2V1>T0 T0V4 T0V5 T2V4>T0 T2V5>T0"
    assert text.splitlines()[4].split() == row.split()
    assert "32 of 64 values of a quad pair (0.50)" in text
    assert "2 across lane ^ 2" in text
    assert "must move   nothing" in ok("m8n8k4", "--acc", "f16", "--chain")


def test_an_arrangement_draws_the_warp() -> None:
    text = ok("m8n8k4", "--acc", "f16", "--chain", "--arrangement", "2x2")
    assert "T0V0+T8" in text
    assert "64 of 128 values of a quad pair (0.50)" in text
    assert "T31V7" in ok("m8n8k4", "--acc", "f16", "--arrangement", "4x1")


def test_every_operand_of_every_instruction_can_be_drawn() -> None:
    for name in ("m8n8k4", "m16n8k8", "m16n8k16"):
        for acc in ("f16", "f32"):
            mma = instruction(name, acc=acc)
            for operand in "abc":
                picture = fragment_picture(mma, operand)
                fragment = mma.operand(operand)
                seats = {(s.lane, s.value) for row in picture.rows for s in row}
                assert len(seats) == fragment.rows * fragment.columns
                assert len(list(picture_lines(picture))) == len(picture.rows) + 1
            assert list(picture_lines(chain_picture(mma, "a")))
    assert list(picture_lines(chain_picture(instruction("m8n8k4"), "b", arrangement("2x2"))))


def test_32_lanes_have_32_colours() -> None:
    for name, where in (("m16n8k16", None), ("m8n8k4", arrangement("4x1"))):
        squares = [s for row in fragment_picture(instruction(name), "c", where).rows for s in row]
        assert len({s.colour for s in squares}) == 32
        assert len({(s.lane, s.colour) for s in squares}) == 32


def test_json_holds_map_and_chain() -> None:
    document = json.loads(ok("m8n8k4", "--acc", "f32", "--json"))
    assert (document["schema_version"], document["kind"]) == (1, "npusim.layout")
    assert document["map"][2][0] == [0, 0, 2]  # lane 2, value 0: quad pair 0, row 0, column 2
    assert document["row_butterflies"] == [2]
    chained = json.loads(ok("m8n8k4", "--acc", "f32", "--chain", "--json"))["chain"]
    assert (chained["in_place"], chained["values"], chained["shuffle_masks"]) == (32, 64, [2, 2])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("m8n8k8",), "unknown instruction 'm8n8k8'"),
        (("m16n8k16", "--a", "col"), "A is always row"),
        (("m8n8k4", "--chain", "--operand", "c"), "C is added"),
        (("m8n8k4", "--arrangement", "3x1"), "4 groups of lanes, not 3"),
        (("m8n8k4", "--arrangement", "four"), "such as 4x1"),
    ],
)
def test_bad_input_exits_with_2_and_says_why(arguments: tuple[str, ...], words: str) -> None:
    result = CliRunner().invoke(app, ["layout", *arguments])
    assert result.exit_code == 2
    assert result.stderr.startswith("npusim: error: ")
    assert words in result.stderr


@pytest.mark.parametrize(("no_color", "coloured"), [("", True), ("1", False)])
def test_a_terminal_gets_colours_unless_no_color(no_color: str, coloured: bool) -> None:
    main, side = pty.openpty()
    code = "import sys; sys.argv = ['npusim', 'layout', 'm8n8k4']; from npusim.cli import main; main()"
    environment = {**os.environ, "TERM": "xterm-256color", "PYTHONPATH": str(REPOSITORY)}
    environment["NO_COLOR"] = no_color
    environment.pop("COLORTERM", None)
    environment.pop("FORCE_COLOR", None)
    with subprocess.Popen([sys.executable, "-c", code], stdout=side, env=environment) as process:
        os.close(side)
        text = b""
        try:
            while part := os.read(main, 65536):
                text += part
        except OSError:
            pass  # Linux: the other end is closed
    os.close(main)
    assert process.returncode == 0
    assert (b"\x1b[30;48;5;" in text) == coloured
    assert (b"\x1b" in text) == coloured
    assert b"T19V7" in text
