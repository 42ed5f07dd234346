"""Files of others: no hang, no escape from the folder, no control sequence, no formula, no huge array."""

from __future__ import annotations

import csv
import io
import os
import re
import signal
import time
import zipfile
from typing import TYPE_CHECKING

import numpy as np
import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from npusim.cli.app import app
from npusim.config.document import parse_document, read_document
from npusim.config.huggingface import import_config
from npusim.config.load import load_workload
from npusim.config.yaml_text import MOST_VALUES
from npusim.errors import SpecError, TensorError
from npusim.report.text import Facts, Grid, Heading, cells, plain, pre_html
from npusim.sanitize import csv_cell, json_safe, visible
from npusim.simulation.tensor_files import load_tensors
from npusim.studies.explore.store import PointOutcome, export
from npusim.studies.validate.vectors import load_vectors

if TYPE_CHECKING:
    from pathlib import Path

WORKLOAD = (
    "schema: npusim.workload/1\nname: {name}\ndescription: {description}\nsource: x\n"
    "heads: 2\nhead_dim: 64\nseq: 64\ncausal: false\n"
)
RED = r'"red \e[31m =cmd()"'


def _npusim(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    inside = tmp_path / "inside"
    inside.mkdir()
    monkeypatch.chdir(inside)
    return inside


# ---------------------------------------------------------------- what is no file


READERS = (
    ("report", "{}"),
    ("compare", "{}", "{}"),
    ("check", "{}"),
    ("validate", "{}"),
    ("workload", "import", "{}"),
    ("run", "flash", "-w", "{}"),
    ("run", "flash", "--hw", "{}"),
    ("run", "flash", "--tensors", "{}"),
    ("diff", "{}", "flash", "--seq", "64"),
    ("hw", "validate", "{}"),
)


@pytest.mark.parametrize(
    "command",
    [
        "report {}.json",
        "compare {}.csv {}.csv",
        "check {}.yaml",
        "validate {}.yaml",
        "validate {}.npz",
        "workload import {}.json",
        "run flash -w {}.yaml",
        "run flash --hw {}.yaml",
        "run flash --tensors {}.npz",
        "run flash --tensors {}.safetensors",
        "diff {}.npz flash --seq 64",
        "hw validate {}.yaml",
        "import ncu {}.csv --map {}.yaml",
    ],
)
def test_pointers_of_git_lfs_are_named(command: str, elsewhere: Path) -> None:
    for word in command.split():
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 4536601\n"
        if word.startswith("{}"):
            (elsewhere / word.format("file")).write_text(pointer)
    code, out, error = _npusim(*command.replace("{}", "file").split())
    assert code == 2
    assert "this is a pointer of Git LFS, not the file; git lfs pull fetches the file" in out + error


@pytest.mark.parametrize("command", READERS, ids=" ".join)
@pytest.mark.parametrize("ending", ["", ".yaml", ".npz", ".json", ".csv"])
def test_pipes_and_devices_are_not_read(ending: str, command: tuple[str, ...], elsewhere: Path) -> None:
    """A pipe that nobody writes to would be waited for, a device read, for ever."""
    os.mkfifo(elsewhere / f"pipe{ending}")
    (elsewhere / f"zero{ending}").symlink_to("/dev/zero")
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it is read"))
    for name in ("pipe", "zero"):
        signal.alarm(120)
        try:
            code, stdout, stderr = _npusim(*(word.format(f"{name}{ending}") for word in command))
        finally:
            signal.alarm(0)
        assert code == 2
        assert f"{name}{ending}" in stdout + stderr


# ---------------------------------------------------------------- names are file names


@pytest.mark.parametrize("name", ["../../x", r'"a\e[31m"', '"a/b"', '".x"', f'"{"n" * 101}"', '"a\\nb"'])
def test_a_name_that_is_no_file_name_is_refused_with_its_line(name: str, elsewhere: Path) -> None:
    (elsewhere / "w.yaml").write_text(WORKLOAD.format(name=name, description="x"))
    code, stdout, stderr = _npusim("run", "flash", "-w", "w.yaml")
    assert (code, stdout) == (2, "")
    assert stderr.startswith("npusim: error: w.yaml:2  name: ")
    assert 'no / \\ : * ? " < > |, and no dot at the beginning' in stderr
    assert stderr.count("\n") == 1
    assert "\x1b" not in stderr
    assert sorted(p.name for p in elsewhere.parent.rglob("*")) == ["inside", "w.yaml"]


def test_names_of_devices_and_imports_are_held_to_the_same(elsewhere: Path) -> None:
    code, _, stderr = _npusim("run", "flash", "-C", "name=../x", "--no-save")
    assert code == 2
    assert "-C name=../x: '../x' has '/'" in stderr
    (elsewhere / "c.json").write_text('{"hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1}')
    with pytest.raises(SpecError, match="name: 'a\\\\x00b' has"):
        import_config(elsewhere / "c.json", name="a\0b")


def test_a_name_with_spaces_makes_a_folder_without(elsewhere: Path) -> None:
    (elsewhere / "w.yaml").write_text(WORKLOAD.format(name="my model 7B", description="x"))
    code, _, stderr = _npusim("run", "flash", "-w", "w.yaml", "--no-numerics", "--no-trace")
    assert code == 0
    assert re.search(r"wrote runs/flash-my_model_7B-64-ascend_910b2-[0-9a-f]{6}/", stderr)
    code, _, stderr = _npusim("explore", "flash", "-w", "w.yaml", "-f", "depth=1", "-j1")
    assert re.search(r"wrote runs/explore-flash-my_model_7B-64-ascend_910b2-[0-9a-f]{6}\.csv", stderr)


# ---------------------------------------------------------------- YAML and JSON


def test_aliases_that_multiply_are_refused_at_once() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    text = "\n".join(lines)
    assert len(text) < 1024
    start = time.process_time()
    with pytest.raises(SpecError, match=r"f.yaml:\d+  a4: more than 100,000 values .* aliases multiply"):
        parse_document(text, file="f.yaml")
    assert time.process_time() - start < 5
    many = "a: [" + ", ".join(["1"] * (MOST_VALUES // 10)) + "]"
    assert len(parse_document(many, file="f").data["a"]) == MOST_VALUES // 10  # type: ignore[arg-type]


def test_files_of_absurd_size_are_not_read(tmp_path: Path) -> None:
    file = tmp_path / "big.yaml"
    with file.open("wb") as stream:
        stream.truncate(1 << 33)
    with pytest.raises(SpecError, match=r"big.yaml: has 8,192 MiB; files of this kind have 16 MiB at most"):
        read_document(file)
    with pytest.raises(SpecError, match="16 MiB at most"):
        import_config(file)


@pytest.mark.parametrize("text", ["[" * 200_000, '{"hidden_size": ' + "9" * 5000 + "}"])
def test_json_that_python_cannot_hold_is_an_error_of_its_file(text: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(SpecError, match=r"config.json:1  not readable: "):
        import_config(file)
    code, _, stderr = _npusim("compare", str(file), str(file))
    assert code == 2
    assert "not a JSON file" in stderr


# ---------------------------------------------------------------- npz


def _npz(path: Path, shape: tuple[int, ...], data: bytes, *, name: str = "q", packed: bool) -> Path:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f2", "fortran_order": False, "shape": shape})
    kind = zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED
    with zipfile.ZipFile(path, "w", kind) as archive:
        archive.writestr(f"{name}.npy", header.getvalue() + data)
    return path


@pytest.mark.parametrize("packed", [False, True])
def test_an_array_that_claims_more_than_its_file_holds_is_refused_by_size(packed: bool, tmp_path: Path) -> None:
    file = _npz(tmp_path / "a.npz", (1, 1, 1 << 27, 128), b"\0" * 64, packed=packed)
    for read in (load_tensors, load_vectors):
        with pytest.raises(TensorError, match=r"a\.npz: q should have 32 GiB, but the file has at most"):
            read(file)


def test_more_than_any_run_needs_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("npusim.formats.archives.MOST_BYTES", 1000)
    np.savez_compressed(tmp_path / "a.npz", k=np.zeros(300, "float16"), q=np.zeros(300, "float16"))
    with pytest.raises(TensorError, match=r"up to q have 1.2 KiB; allowed: 1000 B"):
        load_tensors(tmp_path / "a.npz")


# ---------------------------------------------------------------- what is shown


def test_text_of_others_reaches_terminal_json_and_html_without_controls(elsewhere: Path) -> None:
    (elsewhere / "w.yaml").write_text(WORKLOAD.format(name="w", description=RED))
    code, stdout, _ = _npusim("workload", "show", "w.yaml")
    assert code == 0
    assert stdout.startswith("w   red \\x1b[31m =cmd()\n")
    _, stdout, _ = _npusim("workload", "show", "w.yaml", "--json")
    assert "\x1b" not in stdout
    assert "\\u001b[31m" in stdout
    blocks = (Heading("\x9b31m"), Facts((("a\u202eb", cells("x\ry")),)), Grid(("\x07",), "<", ()))
    for text in (plain(blocks), pre_html(blocks)):
        assert "\\x9b31m" in text
        assert text.replace("\n", "").isprintable()
    assert load_workload(elsewhere / "w.yaml").description == "red \x1b[31m =cmd()", "kept as it is"


def test_visible_keeps_text_of_all_languages() -> None:
    assert visible("Größe 注意力 ∞ a\u00a0b\n") == "Größe 注意力 ∞ a\u00a0b\n"
    assert visible("\u2028\x00\x7f\ud800") == "\\u2028\\x00\\x7f\\ud800"
    assert json_safe('"\x9b\u202e\udcff"') == '"\\u009b\\u202e\\udcff"'


@pytest.mark.parametrize(
    ("cell", "shown"),
    [
        ("=1+1", "'=1+1"),
        ("@x", "'@x"),
        ("-x", "'-x"),
        ("\t=x", "\\t=x"),
        ("-1", "-1"),
        ("+2e3", "+2e3"),
        ("plain", "plain"),
        (-1, -1),
        (None, None),
    ],
)
def test_cells_that_look_like_formulas_are_text(cell: object, shown: object) -> None:
    assert csv_cell(cell) == shown


def test_points_of_a_search_are_written_as_such_cells(tmp_path: Path) -> None:
    export(tmp_path / "a.csv", [PointOutcome(0, {"acc": "=HYPERLINK(1)"}, "infeasible", reason="@x\x1b: y")])
    with (tmp_path / "a.csv").open(newline="") as file:
        row = next(iter(csv.DictReader(file)))
    assert (row["acc"], row["reason"]) == ("'=HYPERLINK(1)", "'@x\\x1b: y")


def test_a_model_built_in_python_is_held_to_its_name_too() -> None:
    load = load_workload("pangu_38b")
    with pytest.raises(ValidationError, match="no dot at the beginning"):
        type(load).model_validate({**load.model_dump(by_alias=True), "name": ".."})
