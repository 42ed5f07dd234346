"""What twenty typical commands print, kept in ``transcripts/`` so that a change is seen in review; and what pages show.

    python -m tests.cli.transcripts

writes them anew, the README's too, from the root of the repository.  Shapes are small: it takes seconds.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import tempfile
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from typer.testing import CliRunner

from npusim.cli.app import app
from npusim.cli.guide import guides
from tests.cli.odd_files import write_odd_files

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = [
    "COMMANDS",
    "FOLDER",
    "README",
    "anew",
    "blocks",
    "needs_triton",
    "renewed",
    "shown",
    "transcript",
    "write_guides_files",
]

README = Path(__file__).parents[2] / "README.md"
#: A block of code of a page; the file that it is, if it says so.
FENCE = re.compile(r"(?ms)(?:<!-- file: (?P<file>\S+) -->\n)?^```(?P<kind>\w*)\n(?P<text>.*?)^```\n")

#: Characters that a line of the README's code has where it is shown, on a code host or on the site.
COLUMNS = "90"

FOLDER = Path(__file__).parent / "transcripts"
#: Name of a file -> the commands it shows, in one folder that has the files of ``odd_files``.
COMMANDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "help": ("--help", "run"),
        "run_flash": ("run flash --seq 512 --no-trace",),
        "run_pasa": ("run pasa --seq 256 --heads 0 --no-save",),
        "run_decode": ("run flash -w llama2_70b --seq-q 1 --seq-kv 1k --no-numerics --no-save",),
        "run_large_heads": (
            "run flash --tensors wide.npz --no-save",
            "run flash --tensors wide.npz --dtype float16 --no-save",
        ),
        "run_overflow": ("run flash -w pasa_resonance --seq 128 --heads 0 --precision fa16 --diagnose --no-save",),
        "run_volta": ("run volta_flash --seq 256 --no-numerics --no-save",),
        "run_gemm": ("run gemm --problem m=256,n=256,k=256 --no-save", "run copy --problem bytes=1MiB --no-save"),
        "run_node": ("run tiling_allreduce -w smollm2 --seq 320 --tp 3 --no-save",),
        "run_sensitivity": ("run flash --seq 128 --no-numerics --sensitivity --full --no-save",),
        "run_fields": ("run flash --fields",),
        "run_errors": (
            "run flash -t block_q=512 -t block_kv=512 -t vector_rows=16",
            "run flash --seq 64k --rows all",
            "run flash -C clock=1e9",
            "run flsh",
        ),
        "explore": ("explore flash -f block_kv=128,256 -f block_q=64,2048 --seq 256 -j1 -o tiles.csv",),
        "explore_json": ("explore flash -f depth=1,2 --seq 128 -j1 --json -o depths.csv",),
        "compare": (
            "run flash --seq 256 --heads 0 -o a",
            "run flash --seq 256 --heads 0 -t block_kv=128 -o b",
            "compare a b",
        ),
        "check": ("check base_new.yaml", "check base_new.yaml --update", "check base_new.yaml"),
        "validate": ("validate --template", "validate measured.yaml", "validate odd_cases.yaml"),
        "hw": ("hw list", "hw show ascend_910b2 --only links", "hw validate negative.yaml"),
        "workload": ("workload list", "workload show llama2_70b", "workload import config.json"),
        "layout": ("layout m8n8k4 --acc f16",),
        "format": ("format", "format mxfp4", "format nvfp4 --rule sage3 --values 6,1,-0.2", "format hifloat8"),
    }
)
#: What changes without a change of what is said: digests of device files, temporary folders.
_VARYING = ((re.compile(r"\b[0-9a-f]{12}\b"), "<digest>"), (re.compile(r"/\S*/tmp\w*/"), "<folder>/"))


#: What stderr says only of slow machines and first runs.
PASSING = re.compile(r"compiling numeric|choosing values of the fields|simulating \S+(?:$|: \d+ of)| s so far$")


def transcript(name: str, folder: Path) -> str:
    """Return the commands of ``name`` with what they print in ``folder``; lines of stderr begin with ``!``."""
    parts = []
    before = Path.cwd()
    os.chdir(folder)
    try:
        for command in COMMANDS[name]:
            result = CliRunner().invoke(app, shlex.split(command))
            # What is said once a machine, when there is no cache yet, is no part of what a command says.
            told = [line for line in result.stderr.splitlines() if not PASSING.search(line)]
            said = "".join(f"! {line}\n" for line in told)
            code = f"[exit code {result.exit_code}]\n" if result.exit_code else ""
            parts.append(f"$ npusim {command}\n{result.stdout}{said}{code}")
    finally:
        os.chdir(before)
    text = "\n".join(parts)
    for pattern, word in _VARYING:
        text = pattern.sub(word, text)
    return "".join(f"{line.rstrip()}\n" for line in text.splitlines())


def blocks(page: str) -> Iterator[re.Match[str]]:
    """Yield the blocks of code of a page, as matches of ``file``, ``kind`` and ``text``."""
    yield from FENCE.finditer(page)


def shown(block: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the commands of a block, as they are typed, each with the lines that the page shows of its output."""
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        command, *lines = part.splitlines()
        yield command, lines


def anew(lines: list[str], printed: str) -> list[str]:
    """Return the lines that a page shows, as they are printed; ``...`` stands for any lines left out.

    A line is found again by its label: its text up to two spaces behind a word.
    """
    found, rest = list[str](), iter(printed.splitlines())
    for before, line in pairwise(["", *lines]):
        if line.strip() == "...":
            found.append(line)
        elif before.strip() == "...":
            found.append(next((own for own in rest if _label(own) == _label(line)), f"not printed: {line}"))
        else:
            found.append(next(rest, f"not printed: {line}"))
    if not lines or lines[-1].strip() != "...":
        found += rest
    return found


def _label(line: str) -> str:
    return re.split(r"(?<=\w)  ", line)[0]


def write_guides_files(folder: Path) -> None:
    """Write the files that the guides show: the README's commands name them."""
    for text in guides().values():
        for block in blocks(text):
            if block["file"] and "/" not in block["file"]:
                (folder / block["file"]).write_text(block["text"], encoding="utf-8")


def needs_triton(text: str) -> bool:
    """Return whether a block of code records a Triton program."""
    return "npusim record" in text


def renewed(text: str) -> str:
    """Return a block of code whose commands are run in the current folder, with their present output."""
    for command, lines in shown(text):
        said = CliRunner().invoke(app, shlex.split(command)[1:], env={"COLUMNS": COLUMNS}).stdout
        text = text.replace("\n".join((command, *lines)), "\n".join((command, *anew(lines, said))))
    return text


def _write_all() -> None:
    for name in ("CI", "COLUMNS"):
        os.environ.pop(name, None)
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.glob("*.txt"):
        old.unlink()
    for name in COMMANDS:
        with tempfile.TemporaryDirectory(prefix="tmp") as folder:
            write_odd_files(Path(folder))
            (FOLDER / f"{name}.txt").write_text(transcript(name, Path(folder)), encoding="utf-8")
    page = README.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        write_guides_files(Path(folder))
        for text in [block["text"] for block in blocks(page)]:
            if find_spec("triton") or not needs_triton(text):
                page = page.replace(text, renewed(text))
    README.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    _write_all()
