"""The site: every page of the repository is in it, links lead somewhere, and it is built where it can be."""

from __future__ import annotations

import ast
import importlib
import json
import re
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

import npusim
from reports.site.build import CONFIG, MODULES, gather, list_versions, main
from tests.cli.transcripts import blocks

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the gathered pages by their place."""
    folder = tmp_path_factory.mktemp("docs")
    return {path.relative_to(folder).as_posix(): path for path in gather(folder)}


def test_every_guide_study_and_command_is_a_page_of_the_menu(pages: dict[str, Path], repository: Path) -> None:
    menu = set(re.findall(r"[\w./-]+\.md", CONFIG.read_text(encoding="utf-8").partition("\nnav:")[2]))
    assert menu == {name for name in pages if name.endswith(".md")}
    studies = {f"studies/{p.parent.name}/{p.parent.name}.md" for p in (repository / "reports").glob("*/page.py")}
    guides = {f"guides/{p.name}" for p in (repository / "npusim" / "docs").glob("*.md")}
    assert studies | guides < menu
    commands = pages["reference/commands.md"].read_text(encoding="utf-8")
    assert all(f"\n## {verb}\n" in commands for verb in ("run", "explore", "compare", "hw", "validate"))
    assert "Traceback" not in commands


def test_links_and_pictures_lead_to_files_of_the_site(pages: dict[str, Path]) -> None:
    for name, path in pages.items():
        if name.endswith(".md"):
            text = re.sub(r"(?ms)^```.*?^```$|`[^`\n]*`", "", path.read_text(encoding="utf-8"))
            for link in re.findall(r"\]\(([^)\s#]+)(?:#[^)]*)?\)", text):
                assert "://" in link or (path.parent / link).is_file(), f"{name}: {link}"
            for picture in re.findall(r'\bsrc(?:set)?="([^"]+)"', text):
                assert (path.parent / picture).is_file(), f"{name}: {picture}"


def test_blocks_of_python_are_python(pages: dict[str, Path]) -> None:
    """Those of README and guides are run as they stand (tests/cli); the gallery's are the package's own lines."""
    for path in pages.values():
        if path.suffix == ".md":
            for block in blocks(path.read_text(encoding="utf-8")):
                if block["kind"] == "python":
                    ast.parse(block["text"])


def test_the_site_is_built_and_asks_nothing_of_the_network(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("mkdocs", reason="npusim[site] is not installed")
    words = ["--out", str(tmp_path / "site"), "--versioned", "--repository", "https://example.org/npusim"]
    assert main(words) == 0, caplog.text
    assert capsys.readouterr().out.strip().endswith("index.html")
    site = tmp_path / "site" / npusim.__version__
    built = [*site.rglob("*.html")]
    assert len(built) > 25
    loaded = re.compile(r"""<(?:script|link rel="(?!canonical|edit)|img)[^>]+(?:src|href)="(https?:)?//""")
    assert not [path.name for path in built if loaded.search(path.read_text(encoding="utf-8"))]
    edit = 'href="https://example.org/npusim/edit/main/npusim/docs/tile.md"'
    assert edit in (site / "guides" / "tile.html").read_text(encoding="utf-8")
    assert "/edit/main/" not in (site / "reference" / "commands.html").read_text(encoding="utf-8")  # written, not read


def test_versions_are_listed_and_the_first_page_leads_to_the_newest(tmp_path: Path) -> None:
    for name in ("0.2.0", "0.10.1", "assets"):
        (tmp_path / name).mkdir()
    list_versions(tmp_path)
    listed = json.loads((tmp_path / "versions.json").read_text(encoding="utf-8"))
    assert [(v["version"], v["aliases"]) for v in listed] == [("0.10.1", ["latest"]), ("0.2.0", [])]
    assert "url=./0.10.1/index.html" in (tmp_path / "index.html").read_text(encoding="utf-8")


@pytest.mark.exhaustive
@pytest.mark.parametrize("page", ["index.html", "guides/tile.html"])
def test_the_search_works_from_a_folder(tmp_path_factory: pytest.TempPathFactory, page: str) -> None:
    """A browser that opens a file, with no server, finds a word of the studies; the field is in sight at 1280."""
    pytest.importorskip("mkdocs", reason="npusim[site] is not installed")
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium here: the search was not tested")
    folder = tmp_path_factory.mktemp("site")
    assert main(["--out", str(folder)]) == 0
    words = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    words += ["--window-size=1280,900", "--virtual-time-budget=20000", "--dump-dom"]
    url = f"file://{folder / page}?q=resonance"
    dom = subprocess.run([browser, *words, url], capture_output=True, text=True, check=True, timeout=300).stdout
    found = re.search(r'md-search-result__meta">\s*(\d+) matching documents', dom)
    assert found
    assert int(found[1]) >= 3
    assert 'class="md-search" data-md-component="search" role="dialog" hidden' not in dom


def test_without_its_generator_the_site_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "mkdocs.commands.build", None)
    assert main(["--out", str(tmp_path)]) == 2
    assert "python -m pip install '.[site]'" in capsys.readouterr().err


def test_every_documented_name_is_there() -> None:
    """MkDocs reads the sources: a name that has moved ends the build."""
    for name in (name for names in MODULES.values() for name in names):
        owner, _, attribute = name.rpartition(".")
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            assert hasattr(importlib.import_module(owner), attribute), name
