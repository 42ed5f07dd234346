"""All documentation as one site: ``python reports/site/build.py [--out DIR] [--versioned] [--repository URL]``.

README, guides, architecture, the studies, the arguments of every command and Python function, and the changelog, built
with MkDocs (``python -m pip install '.[site]'``).  The pages are those of the repository: the script gathers them in a
separate folder and adapts the links between them.  The site needs no server and no
network: open ``index.html``; its search works from a folder too.
"""

from __future__ import annotations

import argparse
import inspect
import json
import logging
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from npusim import __version__
from npusim.cli.app import app
from npusim.errors import NpusimError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["CONFIG", "MODULES", "gather", "list_versions", "main"]

CONFIG = HERE / "mkdocs.yml"
STUDIES = ROOT / "reports"
#: Pages of the repository by their place in the site.
PAGES = {
    "index.md": ROOT / "README.md",
    "architecture.md": ROOT / "npusim" / "README.md",
    "changelog.md": ROOT / "CHANGELOG.md",
    "studies/README.md": STUDIES / "README.md",
}
#: The page of objects that calls return.
OBJECTS = "objects"
#: Modules whose public names the reference lists.
MODULES = {
    "npusim": (
        "npusim.run.run",
        "npusim.report.compared_runs.compare",
        "npusim.studies.explore.explore",
        "npusim.studies.invariance.invariant",
        "npusim.studies.stress.stress",
        "npusim.studies.evaluate.evaluation.evaluate",
        "npusim.kernels.tilelang.recording.record",
        "npusim.studies.tune.hooks.triton",
        "npusim.errors",
    ),
    OBJECTS: (
        "npusim.run.RunResult",
        "npusim.report.comparison.Comparison",
        "npusim.studies.explore.exploration.Exploration",
        "npusim.report.tuning.Tuning",
        "npusim.studies.stress.worst_search.Stress",
        "npusim.studies.invariance.examination.Invariance",
        "npusim.kernels.triton.calls.Calls",
        "npusim.studies.evaluate.evaluation.Evaluation",
    ),
    "npusim.kernel": ("npusim.kernel", "npusim.kernels.form.language"),
    "npusim.machine": ("npusim.machine",),
    "npusim.formats": (
        "npusim.formats",
        "npusim.formats.cast",
        "npusim.formats.block_formats",
        "npusim.formats.matmul",
    ),
}
#: Pages that are alone under their tab: an empty menu at their side would leave less width for code.
ALONE = "---\nhide: [navigation]\n---\n"
#: A file of a picture that Markdown states as HTML: one for wide and one for narrow screens.
PICTURE = re.compile(r'\b(src|srcset)="([^"]+\.svg)"')
LINK = re.compile(r"(!?\[[^\]]*\])\(([^)#\s]+)(#[^)]*)?\)")


def gather(folder: Path) -> list[Path]:
    """Copy and write every page of the site to ``folder``; return their paths there."""
    placed = {source.resolve(): folder / where for where, source in _placed()}
    for source, target in placed.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix == ".md":
            target.write_text(_linked(source, target, placed), encoding="utf-8")
        else:
            shutil.copyfile(source, target)
    for asset in ("style.css", "iframe-worker.js", "tables.js"):
        shutil.copyfile(HERE / asset, folder / asset)
    written = {folder / "reference" / f"{name}.md": text for name, text in (*_commands(), *_modules())}
    for path, text in written.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return [*placed.values(), *written]


def _placed() -> Iterator[tuple[str, Path]]:
    """Yield the place of each file of the repository in the site."""
    yield from PAGES.items()
    for guide in sorted((ROOT / "npusim" / "docs").glob("*.md")):
        yield f"guides/{guide.name}", guide
    for page in sorted(STUDIES.glob("*/*.md")):
        if page.stem == page.parent.name:
            for file in (page, *sorted(page.parent.glob("*.svg"))):
                yield f"studies/{page.stem}/{file.name}", file


def _linked(source: Path, target: Path, placed: dict[Path, Path]) -> str:
    """Return a page whose links to other pages and pictures are those of the site."""

    def lead(found: re.Match[str]) -> str:
        label, link, part = found[1], found[2], found[3] or ""
        there = placed.get((source.parent / link).resolve())
        if "://" in link or there is None:
            return found[0] if "://" in link else label.strip("[]")
        return f"{label}({_relative(there, target.parent)}{part})"

    def picture(found: re.Match[str]) -> str:
        there = placed.get((source.parent / found[2]).resolve())
        return found[0] if there is None else f'{found[1]}="{_relative(there, target.parent)}"'

    text = LINK.sub(lead, source.read_text(encoding="utf-8"))
    text = PICTURE.sub(picture, text)
    text = re.sub(r"(?m)^<!-- file: (\S+) -->\n", r"File `\1`:\n\n", text)
    text = re.sub(r"(?m)^<!-- test: \S+ -->\n", "", text)
    is_alone = re.search(rf"(?m)^  - [^\n]*: {re.escape(_place(source))}$", CONFIG.read_text(encoding="utf-8"))
    return f"{ALONE}{text}" if is_alone else text


def _place(source: Path) -> str:
    return next((where for where, file in _placed() if file == source), "")


def _relative(path: Path, folder: Path) -> str:
    up = 0
    while not path.is_relative_to(folder):
        folder, up = folder.parent, up + 1
    return "../" * up + path.relative_to(folder).as_posix()


def _commands() -> Iterator[tuple[str, str]]:
    """Yield the page of all commands: for each a line on it, a table of its options by heading, and its examples."""
    from typer.main import get_command

    group: Any = get_command(app)
    context = group.make_context("npusim", [], resilient_parsing=True)
    parts = ["# Commands", "", "The arguments and options of each command, as in `npusim VERB --help`."]
    listed = [name for name in group.list_commands(context) if not group.commands[name].hidden]
    rows = [(f"[{name}](#{name})", group.commands[name].get_short_help_str(1000)) for name in listed]
    parts += ["", _table(("command", "description"), rows), "", _options(group, context)]
    for name in listed:
        parts += ["", f"## {name}", "", *_command(group.commands[name], f"npusim {name}", context)]
    yield "commands", "\n".join(parts) + "\n"


def _command(command: Any, name: str, parent: Any) -> Iterator[str]:
    """Yield the lines of a command's part of the page, and of the verbs below the command."""
    context = command.make_context(name.rpartition(" ")[2], [], parent=parent, resilient_parsing=True)
    text = inspect.cleandoc(command.help or "")
    yield from (f"`{command.get_usage(context).removeprefix('Usage: ')}`", "", _escaped(text), "")
    yield _options(command, context)
    if command.epilog:
        lines = command.epilog.splitlines()
        yield from ("", "Examples:", "", "```bash", *(line.removeprefix("  ") for line in lines[1:]), "```")
    for verb, below in sorted(getattr(command, "commands", {}).items()):
        yield from ("", f"### {name.removeprefix('npusim ')} {verb}", "", *_command(below, f"{name} {verb}", context))


def _options(command: Any, context: Any) -> str:
    """Return the tables of a command's arguments and options, one a heading, those without a heading last."""
    sections: dict[str, list[tuple[str, str]]] = {"Arguments": []}
    for param in command.get_params(context):
        if (record := param.get_help_record(context)) is not None:
            heading = getattr(param, "rich_help_panel", None) or "Options"
            is_argument = param.param_type_name == "argument"
            sections.setdefault("Arguments" if is_argument else heading, []).append((f"`{record[0]}`", record[1]))
    last = sorted(sections.items(), key=lambda section: section[0] == "Options")
    return "\n\n".join(_table((title, "description"), rows) for title, rows in last if rows)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    body = [[row[0], _escaped(row[1]).replace("|", "\\|")] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, ["---"] * len(header), *body))


def _escaped(text: str) -> str:
    """Return text that means itself in Markdown."""
    return re.sub(r"([\\*_<>\[\]#`])", r"\\\1", text)


def _modules() -> Iterator[tuple[str, str]]:
    """Yield a page for each public module, its text that of its docstrings."""
    for title, names in MODULES.items():
        # Names of objects and functions for users are written without their file.
        options = "\n    options: {show_root_full_path: false}" if title in ("npusim", OBJECTS) else ""
        head = title.capitalize() if title == OBJECTS else f"`{title}`"
        yield title, "\n\n".join([f"# {head}", *(f"::: {name}{options}" for name in names)]) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the site; return 0, or 2 if its generator is missing or reports a fault."""
    parser = argparse.ArgumentParser(
        prog="site/build.py", description="Write README, guides, reference and studies as a site."
    )
    parser.add_argument(
        "-o", "--out", type=Path, default=ROOT / "build" / "site", metavar="DIR", help="folder of the site"
    )
    parser.add_argument(
        "--repository", default="", metavar="URL", help="address of the repository: each page gets a link to its source"
    )
    parser.add_argument(
        "--versioned", action="store_true", help="write to DIR/VERSION, and list the versions that DIR has"
    )
    given = parser.parse_args(arguments)
    try:
        return _build(given.out, given.repository.rstrip("/"), is_versioned=given.versioned)
    except NpusimError as error:
        print(f"site/build.py: error: {error}", file=sys.stderr)
        return 2


def _build(out: Path, repository: str, *, is_versioned: bool) -> int:
    try:
        from mkdocs.commands.build import build
        from mkdocs.config import load_config
    except ImportError:
        raise NpusimError("the site needs MkDocs: python -m pip install '.[site]'") from None
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    site = out.resolve() / __version__ if is_versioned else out.resolve()
    with tempfile.TemporaryDirectory() as scratch:
        docs = Path(scratch) / "docs"
        gather(docs)
        config = load_config(str(CONFIG), docs_dir=str(docs), site_dir=str(site), strict=True)
        if repository:
            config.repo_url, config.repo_name = repository, repository.rpartition("/")[2]
            config.theme["features"] = [*config.theme["features"], "content.action.edit"]
            config.plugins["edit"] = _edit_plugin(repository)
        if is_versioned:
            config.extra["version"] = {"provider": "mike", "default": "latest"}
        build(config)
    if is_versioned:
        list_versions(out)
    print(site / "index.html")
    return 0


def _edit_plugin(repository: str) -> Any:
    """Return a plugin of MkDocs that links each page to its source in the repository; written pages have none."""
    from mkdocs.plugins import BasePlugin

    sources = {where: source.relative_to(ROOT).as_posix() for where, source in _placed()}

    def on_page_context(_plugin: Any, context: Any, page: Any, **_: Any) -> Any:
        source = sources.get(page.file.src_uri)
        page.edit_url = source and f"{repository}/edit/main/{source}"
        return context

    return type("Edit", (BasePlugin,), {"on_page_context": on_page_context})()


def list_versions(out: Path) -> None:
    """Write the versions that a folder has, the newest first, as the selector of the theme reads them.

    ``index.html`` and the alias ``latest`` lead to the newest.
    """
    folders = [each.name for each in out.iterdir() if re.fullmatch(r"\d+\.\d+\.\d+", each.name)]
    versions = sorted(folders, key=lambda name: [int(part) for part in name.split(".")], reverse=True)
    listed = [{"version": v, "title": v, "aliases": ["latest"] if v == versions[0] else []} for v in versions]
    (out / "versions.json").write_text(json.dumps(listed, indent=1) + "\n", encoding="utf-8")
    lead = f'<!doctype html><meta http-equiv="refresh" content="0; url=./{versions[0]}/index.html">\n'
    (out / "index.html").write_text(lead, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
