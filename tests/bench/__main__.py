"""CPU time of recorded commands as ratios to another commit: ``python -m tests.bench --against COMMIT [NAME ...]``.

Both versions are copied side by side, compiled to bytecode, with a cache folder each.  Each command runs with one
version and then the other, several times, and the least time of each counts: user and system time of the command and
of all its descendants.  On a shared machine times vary more than ratios of commands that run in turn.  What the first
run stores, the others find: chosen tiles, and proofs that programs have no race, so that a search here is one that is
repeated (a new one of 384 points: 0.58, of invariant 0.29).  ``--write``
stores the rows in ``ratios.csv``, which has the last table, and needs a package without uncommitted changes: a row
names two commits.  The exit code is 1 where a ratio is above `MOST`.
"""

from __future__ import annotations

import argparse
import csv
import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_name("ratios.csv")
COLUMNS = ("name", "goal", "ratio", "before_s", "after_s", "before", "after", "command")
#: The folders of an installation.
FOLDERS = ("npusim", "hwconfigs", "workloads")
#: A ratio above this one is stated in the notes on the change that causes it.
MOST = 1.1
#: Linux: orphaned descendants become children of this process, which then waits for them (``prctl``).
PR_SET_CHILD_SUBREAPER = 36


class Entry(NamedTuple):
    """A recorded command.

    ``goal``: its ratio to d3b48652, or in words.  ``prepares``: a command that writes its input, with the earlier
    version, once.  ``is_first``: with an empty cache folder.  ``needs``: a module without which it is left out.
    """

    words: tuple[str, ...]
    goal: str
    prepares: tuple[str, ...] = ()
    is_first: bool = False
    needs: str = ""

    @property
    def command(self) -> str:
        """The command as it is typed."""
        return " ".join(f"'{word}'" if " " in word else word for word in ("npusim", *self.words))


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


#: A kernel of rows with 65,536 blocks, and the file in which it is tuned.
ROWS = """\
import triton
import triton.language as tl


@triton.jit
def scaled(X, Y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * n + tl.arange(0, BLOCK)
    inside = tl.arange(0, BLOCK) < n
    x = tl.load(X + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(Y + at, (x / tl.sum(tl.abs(x), 0)).to(tl.float16), mask=inside)
"""
_TUNED = ("tune", "rows.py::scaled[R](tensor(R, C), tensor(R, C), C, BLOCK=1024)")
_SMALL = "-f block_q=64:256:64 -f block_kv=128:1024:128 -f depth=1:6:1 -f vector_rows=8,16"
_LARGE = "-f block_q=32:256:32 -f block_kv=64:1024:64 -f depth=1:6:1 -f vector_rows=4,8,16,32"
_DIFFERENT = "flash --hw h200 --seq-q 16 --seq-kv 512 --no-causal --rows all --heads 0"

ENTRIES: Mapping[str, Entry] = {
    "pasa": Entry(_words("run pasa"), "0.65"),
    "time alone": Entry(_words("run flash --no-numerics"), "0.75"),
    "help": Entry(("--help",), "1"),
    "flash 910B2": Entry(_words("run flash --hw ascend_910b2"), "1"),
    "flash H200": Entry(_words("run flash --hw h200"), "1"),
    "flash V100": Entry(_words("run flash --hw v100"), "1"),
    "explore 384": Entry(_words(f"explore flash -j 1 {_SMALL}"), "0.4"),
    "explore 3072": Entry(_words(f"explore flash -j 1 {_LARGE}"), "0.4"),
    "first run": Entry(_words("run pasa"), "0.7", is_first=True),
    "invariant": Entry(_words("invariant split_kv -w qwen2_7b --seq-q 1 --seq-kv 8k --hw h200"), "0.2"),
    "diff 512": Entry(
        _words(f"diff kernel/output.safetensors {_DIFFERENT}"),
        "2 s",
        prepares=_words(f"run {_DIFFERENT} --precision running=float16 --save-output -o kernel"),
    ),
    "stress": Entry(_words("stress flash --seq 256 --budget 1"), "1"),
    "tune rows": Entry(
        (*_TUNED, *_words("--problem R=65536,C=1000 -f warps=2,4,8 --hw h100 -j1")),
        "0.1 s a configuration",
        needs="triton",
    ),
}


class Version(NamedTuple):
    """A copy of a commit's package, with its cache folder."""

    commit: str
    folder: Path
    cache: Path

    def cpu_s(self, words: Sequence[str], at: Path, cache: Path | None = None) -> float:
        """Return the CPU time of a command in the folder ``at``; raise `RuntimeError` where it fails."""
        caches = {"NPUSIM_CACHE": str(cache or self.cache), "TRITON_CACHE_DIR": str(self.cache / "triton")}
        command = [sys.executable, "-P", "-c", "from npusim.cli import main; main()", *words]
        with tempfile.TemporaryFile() as output:
            spent, code = cpu_s(command, output.fileno(), at, {**os.environ, **caches, "PYTHONPATH": str(self.folder)})
            output.seek(0)
            if code:
                raise RuntimeError(f"{self.commit}: {' '.join(words)}: exit code {code}\n{output.read().decode()}")
        return spent


def cpu_s(command: Sequence[str], output: int, at: Path, env: Mapping[str, str]) -> tuple[float, int]:
    """Return user and system time of a command and all its descendants, also those that outlive it, and its exit code.

    This process must have no other children; other systems than Linux leave out descendants that nobody waits for.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    process = subprocess.Popen(command, cwd=at, env=dict(env), stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    spent, code = 0.0, -1
    while True:
        try:
            pid, status, usage = os.wait4(-1, 0)
        except ChildProcessError:
            break
        spent += usage.ru_utime + usage.ru_stime
        if pid == process.pid:
            code = process.returncode = os.waitstatus_to_exitcode(status)
    return spent, code


@contextmanager
def both(against: str) -> Iterator[tuple[Version, Version]]:
    """Return copies of a commit and of the working tree."""
    with tempfile.TemporaryDirectory() as folder:
        versions = []
        for name in ("before", "after"):
            copy = Path(folder, name)
            (copy / "cache").mkdir(parents=True)
            if name == "before":
                commit = _git("rev-parse", "--short=8", f"{against}^{{commit}}").strip()
                _archived(commit, copy)
            else:
                commit = _git("rev-parse", "--short=8", "HEAD").strip()
                commit += " and changes" if is_changed() else ""
                for listed in _git("ls-files", "-co", "--exclude-standard", "--", *FOLDERS).splitlines():
                    if (ROOT / listed).is_file():
                        (copy / listed).parent.mkdir(parents=True, exist_ok=True)
                        shutil.copy2(ROOT / listed, copy / listed)
            subprocess.run([sys.executable, "-m", "compileall", "-q", str(copy)], check=True)
            versions.append(Version(commit, copy, copy / "cache"))
        yield versions[0], versions[1]


def is_changed() -> bool:
    """Return whether the working tree's package has uncommitted changes."""
    return bool(_git("status", "--porcelain", "--", *FOLDERS))


def _archived(commit: str, folder: Path) -> None:
    """Write a commit's package to a folder."""
    archive = folder / "archive.tar"
    _git("archive", "-o", str(archive), commit, *FOLDERS)
    shutil.unpack_archive(archive, folder)
    archive.unlink()


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def compared(entry: Entry, versions: tuple[Version, Version], times: int) -> tuple[float, float]:
    """Return the least CPU time of a command with each of two versions that run in turn.

    Each version runs it once before, uncounted, and so compiles and stores what it needs, unless it is a first run.
    """
    least = [float("inf"), float("inf")]
    with tempfile.TemporaryDirectory() as inputs:
        Path(inputs, "rows.py").write_text(ROWS, encoding="utf-8")
        if entry.prepares:
            versions[0].cpu_s(entry.prepares, Path(inputs))
        for turn in range(times if entry.is_first else times + 1):
            for number, version in enumerate(versions):
                with tempfile.TemporaryDirectory() as at, tempfile.TemporaryDirectory() as empty:
                    shutil.copytree(inputs, at, dirs_exist_ok=True)
                    spent = version.cpu_s(entry.words, Path(at), Path(empty) if entry.is_first else None)
                if turn or entry.is_first:
                    least[number] = min(least[number], spent)
    return least[0], least[1]


def write_table(rows: Mapping[str, Mapping[str, str]]) -> None:
    """Store rows in the table, in the order of the entries; other rows remain with their commits."""
    known = read_table() if TABLE.exists() else {}
    known |= rows
    with TABLE.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(known[name] for name in ENTRIES if name in known)


def read_table() -> dict[str, dict[str, str]]:
    """Return the rows of the table by name."""
    with TABLE.open(newline="", encoding="utf-8") as file:
        return {row["name"]: row for row in csv.DictReader(file)}


def main(words: Sequence[str] | None = None) -> int:
    """Compare the named commands, all by default; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__.partition(":")[0])
    parser.add_argument("name", nargs="*", help=f"commands: {', '.join(ENTRIES)} (default: all)")
    parser.add_argument("--against", required=True, metavar="COMMIT", help="the commit of the earlier version")
    parser.add_argument("--times", type=int, default=3, help="runs of each command with each version (default: 3)")
    parser.add_argument("--write", action="store_true", help="store the rows in tests/bench/ratios.csv")
    asked = parser.parse_args(words)
    if unknown := [name for name in asked.name if name not in ENTRIES]:
        parser.error(f"unknown command {unknown[0]!r}; there are {', '.join(ENTRIES)}")
    if asked.times < 1:
        parser.error(f"--times {asked.times}: must be at least 1")
    if asked.write and is_changed():
        parser.error(f"--write: {', '.join(FOLDERS)} have uncommitted changes; a row names a commit: commit them first")
    rows: dict[str, dict[str, str]] = {}
    with both(asked.against) as versions:
        print(f"{'':<14}{versions[0].commit:>10}{versions[1].commit[:8]:>10}  ratio  goal")
        for name in asked.name or ENTRIES:
            entry = ENTRIES[name]
            if entry.needs and importlib.util.find_spec(entry.needs) is None:
                print(f"{name:<14}left out: it needs {entry.needs}")
                continue
            before, after = compared(entry, versions, asked.times)
            print(f"{name:<14}{before:>8.2f} s{after:>8.2f} s{after / before:>7.2f}  {entry.goal}", flush=True)
            spent = f"{after / before:.2f}", f"{before:.2f}", f"{after:.2f}"
            commits = (version.commit for version in versions)
            rows[name] = dict(zip(COLUMNS, (name, entry.goal, *spent, *commits, entry.command), strict=True))
            if asked.write:
                write_table(rows)
    slower = [name for name, row in rows.items() if float(row["ratio"]) > MOST]
    if slower:
        print(f"above {MOST}: {', '.join(slower)}")
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
