"""What a user installs: the wheel has the package with its data and nothing else, the source archive all of it."""

from __future__ import annotations

import json
import re
import tarfile
import zipfile
from pathlib import Path

import pytest
from ruamel.yaml import YAML
from typer.testing import CliRunner

import npusim
from npusim.cli.app import app

ROOT = Path(__file__).resolve().parents[1]
DATA = ("docs/*.md", "report/template/*", "cli/*.txt", "cli/*.yaml", "studies/probe/*.txt", "formats/*.npz", "py.typed")


def package_files() -> set[str]:
    """Return the files of the package as they lie here."""
    found = {p for p in (ROOT / "npusim").rglob("*.py") if "__pycache__" not in p.parts}
    found |= {p for pattern in DATA for p in (ROOT / "npusim").glob(pattern)}
    return {p.relative_to(ROOT).as_posix() for p in found}


def data_files() -> set[str]:
    """Return the devices and workloads."""
    found = (p for folder in ("hwconfigs", "workloads") for p in (ROOT / folder).rglob("*"))
    return {p.relative_to(ROOT).as_posix() for p in found if p.is_file()}


def test_wheel_has_the_package_its_data_and_nothing_else(tmp_path: Path) -> None:
    wheel = pytest.importorskip("hatchling.builders.wheel", reason="hatchling is not installed: no wheel was built")
    built = next(wheel.WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"]))
    with zipfile.ZipFile(built) as archive:
        names = set(archive.namelist())
        about = next(n for n in names if n.endswith("/METADATA"))
        metadata = archive.read(about).decode()
        entries = archive.read(about.replace("METADATA", "entry_points.txt")).decode()
    info = about.rpartition("/")[0]
    assert package_files() | {f"npusim/{name}" for name in data_files()} | {"npusim/README.md"} == {
        n for n in names if not n.startswith(info)
    }
    assert {n.removeprefix(f"{info}/") for n in names if n.startswith(info)} == {
        "METADATA",
        "WHEEL",
        "RECORD",
        "entry_points.txt",
        "licenses/LICENSE",
        "licenses/NOTICE",
    }
    assert "npusim = npusim.cli:main" in entries
    assert {line.partition(": ")[2] for line in metadata.splitlines() if line.startswith("Provides-Extra")} >= {
        "report",
        "test",
    }


def test_source_archive_has_what_builds_tests_and_explains_it(tmp_path: Path) -> None:
    sdist = pytest.importorskip("hatchling.builders.sdist", reason="hatchling is not installed: no archive was built")
    built = next(sdist.SdistBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"]))
    with tarfile.open(built) as archive:
        names = {n.partition("/")[2] for n in archive.getnames()}
    assert package_files() | data_files() <= names
    assert {
        "README.md",
        "CHANGELOG.md",
        "CITATION.cff",
        "LICENSE",
        "NOTICE",
        "pyproject.toml",
        "tests/conftest.py",
        "reports/build.py",
    } <= names
    assert not [n for n in names if "__pycache__" in n or n.startswith(("runs/", ".git/"))]


def test_one_version_is_in_the_package_its_metadata_citation_and_changelog() -> None:
    texts = {
        name: (ROOT / name).read_text(encoding="utf-8") for name in ("pyproject.toml", "CITATION.cff", "CHANGELOG.md")
    }
    number = re.escape(npusim.__version__)
    assert re.search(rf'(?m)^version = "{number}"$', texts["pyproject.toml"])
    assert re.search(rf"(?m)^version: {number}$", texts["CITATION.cff"])
    first = re.search(r"(?m)^## (.*)$", texts["CHANGELOG.md"])
    assert first
    assert re.fullmatch(rf"{number}, (unreleased|\d{{4}}-\d\d-\d\d)", first[1])
    assert len(texts["CHANGELOG.md"]) < 6000, "one page: what a user needs of a version"


def test_the_action_runs_the_check_that_the_guide_describes() -> None:
    action = YAML(typ="safe").load((ROOT / ".github" / "actions" / "cycles" / "action.yml").read_text(encoding="utf-8"))
    assert action["runs"]["using"] == "composite"
    steps = action["runs"]["steps"]
    assert all("shell" in step for step in steps if "run" in step), "a composite action states each shell"
    (check,) = [step["run"] for step in steps if step.get("name") == "check"]
    words = re.search(r"npusim check .*", check)
    assert words
    options = set(re.findall(r"--[a-z-]+", words[0]))
    shown = CliRunner().invoke(app, ["check", "--help"]).stdout
    assert options == {"--github", "--junit"}
    assert all(option in shown for option in options)
    read = set(re.findall(r"inputs\.([a-z-]+)", str(steps)))
    assert read == set(action["inputs"]), "each input is read, and no other"


def test_the_image_has_what_the_package_is_built_from_and_runs_the_main_job() -> None:
    text = (ROOT / ".github" / "Containerfile").read_text(encoding="utf-8")
    copied = {word for line in re.findall(r"(?m)^COPY (.*) \S+$", text) for word in line.split()}
    assert {"pyproject.toml", "README.md", "LICENSE", "NOTICE", "npusim", "hwconfigs", "workloads"} == copied
    assert all((ROOT / name).exists() for name in copied)
    (command,) = re.findall(r"(?m)^CMD (\[.*\])$", text)
    assert 'ENTRYPOINT ["npusim"]' in text
    schedule = json.loads(command)
    assert schedule[:2] == ["run", "pasa"], "the main job of .ci/run and README"
