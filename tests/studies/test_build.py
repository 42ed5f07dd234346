"""Studies: what is committed is what comes out, and how pages are made of figures."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from npusim.errors import OutputError
from reports.build import SECONDS, STUDIES, build, main
from reports.parts.chart import chart
from reports.parts.check import differences
from reports.parts.document import fill, number, rounded, save, table

if TYPE_CHECKING:
    from pathlib import Path


#: Pages that take less are rebuilt in every run of the tests, and those that take less than `LONGER_S` on request.
SHORT_S, LONGER_S = 5, 30


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (1.0, "1.00"),
        (12.34, "12.3"),
        (0.01234, "0.0123"),
        (0.00999949, "0.0100"),
        (0.0009996, "0.00100"),
        (2.65e-4, "2.65e-4"),
        (115905.4, "115905"),
        (-72397.0, "-72397"),
        (1.5e7, "1.50e7"),
        (math.nan, "NaN"),
        (-math.inf, "-Inf"),
    ],
)
def test_figures_have_three_digits(value: float, text: str) -> None:
    assert number(value) == text


def test_a_table_aligns_columns_of_figures_to_the_right() -> None:
    assert table(["case", "error"], [["U 20, 5", 0.0152], ["U 30", "NaN"]]).splitlines() == [
        "| case | error |",
        "| --- | ---: |",
        "| U 20, 5 | 0.0152 |",
        "| U 30 | NaN |",
    ]


class Pair(NamedTuple):
    value: float
    error: float


def test_json_keeps_four_digits_and_names_what_is_not_finite() -> None:
    data = {1: Pair(1.23456, math.inf), "b": [math.nan, 3, "text"]}
    assert rounded(data) == {"1": {"value": 1.235, "error": "Inf"}, "b": ["NaN", 3, "text"]}


def test_files_are_written_whole_with_a_schema_version(tmp_path: Path) -> None:
    paths = save(tmp_path / "new", {"a.md": "text\n", "a.json": {"x": 0.123456}})
    assert [p.name for p in paths] == ["a.md", "a.json"]
    assert json.loads(paths[1].read_text()) == {"schema_version": 1, "x": 0.1235}


def test_a_template_without_its_figures_is_an_error() -> None:
    with pytest.raises(KeyError):
        fill("tiling_mask", {})


def test_a_chart_leaves_out_what_is_not_finite_and_escapes_names() -> None:
    svg = chart("a < b", "x", "y", {"one": [(0.0, 1.0), (1.0, math.nan), (2.0, 100.0)]}, log_y=True)
    assert "a &lt; b" in svg
    drawn = re.search(r'aria-roledescription="line mark"[^>]* d="(M[^"]+)"', svg)
    assert drawn is not None
    assert drawn[1].count(",") == 2, "two points of three"
    assert "nan" not in svg.lower()


def test_an_unknown_study_is_refused_with_the_near_name_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tiling_mask", "tiling_maks", "--out", str(tmp_path)]) == 2
    assert re.search(
        r"no study named 'tiling_maks'. Did you mean `tiling_mask`\? Allowed: ascend_950, .*, right$",
        capsys.readouterr().err.strip(),
    )
    assert not list(tmp_path.iterdir())


def test_differences_name_the_figure(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    figures: dict[str, Any] = {"a": {"b": [1.0, 2.0]}, "same": 1.001}
    save(old, {"p.json": figures})
    save(new, {"p.json": {"a": {"b": [1.0, 2.1]}, "same": 1.002}})
    assert differences(old, new, "p") == ["p: a.b[1]: 2.0 against 2.1"]
    with pytest.raises(OutputError, match="no figures of a page:"):
        differences(old, new, "q")


def test_every_study_is_listed_with_the_time_it_takes(repository: Path) -> None:
    table = (repository / "reports/README.md").read_text()
    listed = re.findall(r"\]\((\w+)/\1\.md\) \| .* \| (\d+) \|", table)
    assert {name: int(seconds) for name, seconds in listed} == dict(SECONDS)
    folders = {path.parent.name for path in (repository / "reports").glob("*/page.py")}
    assert folders == set(STUDIES)


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_is_committed_with_its_charts(name: str, repository: Path) -> None:
    folder = repository / "reports" / name
    text = (folder / f"{name}.md").read_text()
    assert (folder / f"{name}.json").is_file()
    assert all((folder / part.split(")")[0]).is_file() for part in text.split("](")[1:])


@pytest.mark.parametrize(
    ("least_s", "most_s"), [(0, SHORT_S), pytest.param(SHORT_S, LONGER_S, marks=pytest.mark.exhaustive)]
)
def test_committed_pages_that_take_seconds_are_what_comes_out(
    least_s: int, most_s: int, repository: Path, tmp_path: Path
) -> None:
    """Byte for byte, as their reader would write them: a script, in a process of its own, from any folder."""
    names = [name for name, seconds in SECONDS.items() if least_s <= seconds < most_s]
    command = [sys.executable, str(repository / "reports/build.py"), *names, "--out", "new"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    # Between them a first use says that it compiles.
    told = (rf"{name}: about \d+ s of one core\n(npusim: compiling .*\n)*{name}: took \d+ s\n" for name in names)
    assert re.fullmatch("".join(told), done.stderr)
    written = done.stdout.split()
    assert {f"new/{name}/{name}.md" for name in names} <= set(written)
    for path in written:
        _, name, file = path.split("/")
        kept = repository / "reports" / name / file
        assert (tmp_path / path).read_bytes() == kept.read_bytes(), f"{kept}: python reports/build.py {name}"


def test_studies_read_nothing_outside_the_repository(repository: Path) -> None:
    listed = (repository / "reports").rglob("*.py")
    sources = [path for path in listed if path.parent.name != "silicon"]  # commands on a chip take others' kernels
    assert sources
    outside = re.compile(
        r"""/ ["']shared["']|http(?!://www\.w3\.org/2000/svg)s?://|urlopen|requests\.|parents\[[3-9]\]"""
    )
    assert not [str(p) for p in sources if outside.search(p.read_text(encoding="utf-8"))]


def test_the_package_never_imports_the_studies(repository: Path) -> None:
    sources = [*(repository / "npusim").rglob("*.py")]
    assert sources
    named = re.compile(r"^\s*(from|import) reports\b", re.MULTILINE)
    assert not [str(p) for p in sources if named.search(p.read_text(encoding="utf-8"))]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", STUDIES)
def test_every_committed_study_is_what_comes_out(name: str, repository: Path, tmp_path: Path) -> None:
    """Minutes."""
    build(name, tmp_path)
    assert differences(repository / "reports" / name, tmp_path / name, name) == []
