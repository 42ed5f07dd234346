"""``npusim help`` and ``npusim new``: the guides in ``npusim/docs``, and files to start from."""

import ast
import keyword
import re
import textwrap
from collections.abc import Iterator
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Annotated

import typer

from npusim.cli import options as o
from npusim.cli.console import show_json, show_lines, terminal_width, write
from npusim.cli.help import Verbs, examples
from npusim.errors import SpecError
from npusim.report.text import Grid, Line, cells, document, lines

app = Verbs()
new = Verbs(
    name="new",
    no_args_is_help=True,
    help="Write a first version of your own schedule.",
    epilog=examples(("npusim new schedule mine", "writes mine.py, which npusim run mine.py:mine runs")),
)

#: Comments before a block of code: one kind names the file that the block contains, which readers need; the other kinds
#: are for tests.
_FILE, _MARK = (re.compile(rf"^<!--{words}-->\n", re.MULTILINE) for words in (r" file: (\S+) ", ".*?"))

#: The topic whose text is not a file: the options of a problem, as the command line declares them.
PROBLEM = "problem"
#: The topic of the glossary, whose entries are topics too.
WORDS = "words"

Topic = Annotated[str | None, o.argument("[TOPIC]", "A guide, or a word of the tables; default: list all guides.")]


def guides() -> dict[str, str]:
    """Return the guides' Markdown by topic."""
    folder = files("npusim") / "docs"
    pages = sorted((p.name.removesuffix(".md"), p) for p in folder.iterdir() if p.name.endswith(".md"))
    return {topic: page.read_text(encoding="utf-8") for topic, page in pages}


def entries() -> dict[str, str]:
    """Return the entries of the glossary by their words; for a word with two meanings, the text has both entries."""
    texts: dict[str, str] = {}
    section = ""
    for part in re.split(r"(?m)^(?=##)", guides()[WORDS]):
        title, _, text = part.partition("\n")
        if title.startswith("### "):
            word = title.removeprefix("### ")
            before = f"{texts[word]}\n" if word in texts else ""
            texts[word] = f"{before}{word}   ({section})\n\n{text.strip()}\n"
        elif title.startswith("## "):
            section = title.removeprefix("## ")
    return texts


@app.verb(
    "help",
    ("npusim help", "list of guides"),
    ("npusim help tile", "how to choose a tile"),
    ("npusim help pruned", "a word of the tables"),
)
def show_guide(ctx: typer.Context, topic: Topic = None, json: o.Json = False) -> None:
    """Show a guide (choose a tile, guard cycles in CI, read a trace and more), or explain a word of the tables."""
    known = guides()
    if topic in (None, PROBLEM):
        known = dict(sorted({**known, PROBLEM: _problem_options(ctx)}.items()))
    titles = {name: text.splitlines()[0].lstrip("# ") for name, text in known.items()}
    if topic is None and json:
        show_json(document("help", guides=titles))
        return
    if topic is None:
        width = max(map(len, known))
        lines = [f"  npusim help {name:<{width}}   {title}" for name, title in titles.items()]
        typer.echo("\n".join(["Guides:", *lines, "", "Options of a verb: npusim VERB --help"]))
        return
    if topic not in known:
        listed = ", ".join(sorted((*known, PROBLEM)))
        known |= entries()
        topic = topic if topic in known else topic.replace("-", " ")
        if topic not in known:
            from npusim.config.messages import suggest

            near = suggest(topic, [*known, PROBLEM]).partition("; ")[0]
            raise SpecError(f"help {topic}: there is no such guide or word{near or '.'} Guides: {listed}")
    text = _MARK.sub("", _FILE.sub(r"File `\1`:\n\n", known[topic]))
    if json:
        show_json(document("help", topic=topic, title=titles.get(topic, topic), text=text))
    elif (columns := terminal_width()) is None or topic == PROBLEM:  # such lines are already wrapped
        typer.echo(text, nl=False)
    else:
        show_lines(_wrapped(text, columns))


def _wrapped(text: str, width: int) -> Iterator[Line]:
    """Yield the lines of a guide for a terminal: sentences, tables and commands wrapped, other code unchanged."""
    is_code = False
    for is_table, group in groupby(text.splitlines(), lambda line: line.startswith("|")):
        listed = list(group)
        if is_table and not is_code:
            header, _, *rows = map(_cells_of, listed)
            table = Grid(tuple(header), "<" * len(header), tuple(cells(*row) for row in rows))
            yield from lines((table,), width)
            continue
        paragraph: list[str] = []
        for line in (*listed, ""):
            is_fence = line.startswith("```")
            if paragraph and (is_code or is_fence or not line or re.match(r"#|\s*([-*]|\d+\.) ", line)):
                yield from (((part, ""),) for part in _paragraph(paragraph, width))
                paragraph = []
            is_code ^= is_fence
            if is_code or is_fence or line.startswith("    "):
                yield from (((part, ""),) for part in _code(line, width))
            elif line:
                paragraph.append(line)
            else:
                yield ()


def _code(line: str, width: int) -> Iterator[str]:
    """Yield a line of code; a command after ``$`` is continued on further lines, as a shell reads them."""
    if len(line) <= width or not line.startswith("$ "):
        yield line
        return
    first, *words = re.findall(r"""(?:'[^']*'|"[^"]*"|\S)+""", line)
    made = first
    for word in words:
        if len(made) + len(word) + len("  \\") > width and made.strip() != "$":
            yield f"{made} \\"
            made = "   "
        made += f" {word}"
    yield made


def _cells_of(row: str) -> list[str]:
    """Return the cells of a row of a table in Markdown."""
    return [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", row.strip()[1:-1])]


def _paragraph(listed: list[str], width: int) -> list[str]:
    """Return a paragraph, or an item of a list, in lines of at most ``width`` characters."""
    mark = re.match(r"\s*([-*]|\d+\.) ", listed[0])
    margin = " " * len(mark[0]) if mark else ""
    text = " ".join(line.strip() for line in listed)
    if text.startswith("#"):
        return [text]
    first = listed[0][: len(listed[0]) - len(listed[0].lstrip())]
    return textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=margin, break_long_words=False, break_on_hyphens=False
    )


def _problem_options(ctx: typer.Context) -> str:
    """Return the options of a problem, which most verbs have, in the words of ``npusim run --help``."""
    root = ctx.find_root()
    run = root.command.get_command(root, "run")  # type: ignore[attr-defined]
    return f"# Options of a problem\n\n{run.problem_text(root)}\n"


@new.callback()
def root() -> None:
    """Write a file to start from."""


@new.verb("schedule", ("npusim new schedule mine", "then: npusim run mine.py:mine --seq 1024"))
def schedule(
    name: Annotated[str, o.argument("NAME", "Name of the schedule; the file is NAME.py.")], json: o.Json = False
) -> None:
    """Write NAME.py: a complete schedule whose softmax is written out, so that you can change it."""
    text = (files("npusim.cli") / "new_schedule.txt").read_text(encoding="utf-8")
    _check_name(name, text)
    path = Path(f"{name}.py")
    if path.exists():
        raise SpecError(f"{path}: already exists; choose another name or move the file")
    write(path, text.replace("@NAME@", name), f"; run it: npusim run {path}:{name} --seq 1024")
    if json:
        show_json(document("new", file=str(path)))


def _check_name(name: str, text: str) -> None:
    from npusim.library import SCHEDULES

    if not name.isidentifier() or keyword.iskeyword(name):
        raise SpecError(
            f"{name!r} cannot be the name of a schedule; use letters, digits and _, no digit first, and no keyword "
            "of Python"
        )
    if any(known == name for known, _ in SCHEDULES):
        raise SpecError(f"{name!r} is a packaged schedule; choose another name")
    if name in {n.id for n in ast.walk(ast.parse(text.replace("@NAME@", "_"))) if isinstance(n, ast.Name)} - {"_"}:
        raise SpecError(f"{name!r} has another meaning in the file; choose another name")
