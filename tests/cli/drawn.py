"""Commands drawn by a number: every verb, option and argument that there is, with right and odd values.

Verbs, options and their choices are read off the command line itself, so that a new option is drawn as soon as
there is one.  What looks right for an option is what its examples and the wrong commands give it, and a few
values more (`PLAUSIBLE`); sizes are tiny, so that what happens to be valid is soon over.
"""

from __future__ import annotations

import io
import os
import random
import re
import shlex
import shutil
import sqlite3
import typing
import warnings
import zipfile
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.main import get_group
from typer.testing import CliRunner

from npusim.cli.app import app
from npusim.config.load import list_devices, list_workloads, load_device
from npusim.config.node_file import list_nodes
from npusim.config.packaged import packaged_folder
from npusim.config.tiling import tiling_fields
from npusim.formats import ARITHMETICS
from npusim.library import SCHEDULES
from tests.cli.odd_files import write_odd_files
from tests.cli.test_wrong_commands import WRONG
from tests.declared import declare_tiles

if typing.TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

HUGE = "9" * 5000
_MANY = (HUGE, f"-{HUGE}", "0x" + "f" * 6000, str(2**31), str(2**53), str(2**63), str(2**64))
_ODD = """0 -1 -0 +5 1.5 1e3 1e400 1e-400 nan inf -inf True None null 1_000 1k １２８ ² ٣ é 🐱 注意力
' " ` $(x) %s {0} { [ ] ( * ? \\ # & ! = a=b=c , ,, : - -- -x --help @x 1- -1-5 0,0,0 1:2:3:4 0:1e308
0-300000000 1:300000000:1 tcp://127.0.0.1:1 tls://127.0.0.1:1 . .. ../.. ../../escape / ~ ~nosuchuser
~nosuchuser/x.yaml none.yaml none.npz none/a.csv file/a.csv /dev/null /dev/zero /dev/full /proc/self/mem
/proc/none/x.csv"""
#: Wrong nearly everywhere: numbers, notation, text and paths.
ODD = (
    *_MANY,
    *_ODD.split(),
    *("", " ", "a\u202eb", "\x1b[31m", "a\nb", "a\tb", "\r", "\x07", "\udcff", "\u2028"),
    *("a/" * 2000, "x" * 300, "x" * 5000),
)
_SCALARS = """0 -1 1 2 3 16 64 128 1.5 1e400 1e-300 nan .nan .inf inf null true [] {} [[1]] "" "a" ' x *x
1:30 2026-02-30 "\\ud800" 1_0 ~ 1e9 float17 flash ascend_910b2 none.yaml ../../escape"""
#: What a field of a file, of a tiling or of a device is changed to.
SCALARS = (
    *_MANY,
    *_SCALARS.split(),
    *("", "!!python/object x", "&x 1", "- 1", "4 KiB", '{"a": 1}', "0o" + "7" * 6000, "[" * 5000),
    *("{a: " * 300, "{value: -1, basis: assumed, source: s}"),
)
#: What options and arguments take that looks right, by name, where more is wanted than examples give.
PLAUSIBLE: Mapping[str, str] = {
    **dict.fromkeys(("seq", "seq_q", "seq_kv"), "1 2 16 64 100 128"),
    **dict.fromkeys(("out", "html", "best"), "out out.csv out.yaml out.html out.sqlite out/out.csv"),
    "schedule": " ".join([*dict.fromkeys(name for name, _ in SCHEDULES), "mine.py:mine"]),
    "workload": " ".join([*list_workloads(), "w.yaml"]),
    "hw": " ".join([*list_devices(), *list_nodes()]),
    "batch": "1 2 3",
    "tensor_parallel": "1 2 5",
    "jobs": "1",
    "seed": "0 1",
    "rows": "sample all 0 0,5 1-3",
    "heads": "sample all 0 0,1",
    "window": "0:5 1:2.5",
    "arithmetic": " ".join(ARITHMETICS),
    "tensors": "ok.npz ok.safetensors nan.npz f32.npz",
    "runs": "one two opprof/PipeUtilization.csv flash 'flash -t depth=3' store.csv",
    "folder": "base.yaml best.yaml base_new.yaml one",
    "file": "measured.yaml",
    "config": "config.json",
    "files": "own.yaml changed.yaml",
    "max_rmse": "0.1 1e-9",
    "path": "prof opprof/OpBasicInfo.csv opprof/PipeUtilization.csv ncu_raw.csv ncu_details.csv kineto.json",
    "mapping": "mapping.yaml",
}
#: Launches of Triton kernels and the sizes of their problems, and expressions that are put into them.
LAUNCHES: Mapping[str, tuple[str, ...]] = {
    "attention.py::plain[cdiv(seq_q, BM), batch * heads](q, k, v, o, scale * log2e, seq_kv, D=head_dim, BM=32, BN=32, "
    "CAUSAL=causal)": ("-w", "w.yaml", "--seq", "64"),
    "plain.py::add[cdiv(n, BLOCK)](tensor(n), tensor(n), tensor(n), n, BLOCK=256)": ("--problem", "n=1000"),
    "plain.py::long_softmax[R](tensor(R, C), tensor(R, C), C, B=64)": ("--problem", "R=2,C=60"),
    "plain.py::softmax[3](tensor(R, C).to('float32'), tensor(R, C).to('float32'), R, C, BLOCK=128)": (
        *("--problem", "R=8,C=100"),
    ),
}
_EXPRESSIONS = """0 -1 3.5 'a' None 2**70 9**9**9 10**9 1<<200 'a'*10**10 n-1 k*2 *q **n tensor(3) q.T q.stride(9) v
o.to('int8') tensor(10**30) num_stages=1000 num_warps=3 num_warps=1 num_ctas=2 cdiv(1,0) next_power_of_2(2**99) True
(1,)*10**9 [1] lambda:1 scale seq_kv+1 C=3"""
#: Options of calls as servers make them.
_SERVED = (
    ("--lengths", ("64,16", "100,1,7", "128", "1,1")),
    ("--query-lengths", ("1,4", "16,1", "1,1,1")),
    ("--page", ("16", "64", "1")),
    ("--cache", ("float8_e4m3fn", "int8", "float16")),
    ("--cache-scale", ("token", "head", "channel", "16")),
)
#: What writes files to read and to damage.
_WRITING = """run flash -w w.yaml --seq 64 -o one --save-output
run flash --seq 64 -o two --report
new schedule mine
explore flash --seq 64 -f depth=1,2 -j1 -o store.csv
check base.yaml --update --reason x
check best.yaml --update --reason x"""
TESTS = Path(__file__).parents[1]
#: Verbs with few options that read many kinds of files are drawn more often.
_WEIGHTS: Mapping[tuple[str, ...], int] = {("import",): 6, ("program",): 3}
#: Options that ask for what takes long, whatever else is said.
_LONG = ("force", "auto")


@dataclass(frozen=True, slots=True)
class Drawn:
    """A command, the damaged files that it names, and what its stdout is: a file, closed or a full disk."""

    words: tuple[str, ...]
    files: Mapping[str, bytes]
    stdout: str

    def __str__(self) -> str:
        """Return the command as it is typed, long words cut."""
        said = " ".join(w if len(w) < 80 else f"{w[:40]}...({len(w)})" for w in map(shlex.quote, self.words))
        files = "".join(f"; {name} of {len(data)} bytes" for name, data in self.files.items())
        return repr(f"npusim {said}{files}{'' if self.stdout == 'file' else f' with stdout {self.stdout}'}")


@cache
def verbs() -> dict[tuple[str, ...], Any]:
    """Return the commands of the command line by the words that name them."""

    def walk(group: Any, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
        for name, command in group.commands.items():
            if hasattr(command, "commands"):
                yield from walk(command, (*words, name))
            else:
                yield (*words, name), command

    return dict(walk(get_group(app), ()))


@cache
def seen() -> dict[str, tuple[str, ...]]:
    """Return the values that examples and wrong commands give an option, by its spelling."""
    lines = [command for command, _ in WRONG]
    for command in verbs().values():
        lines += re.findall(r"^  npusim (.*?)(?:   #|$)", command.epilog or "", re.MULTILINE)
    found: dict[str, dict[str, None]] = {}
    for line in lines:
        words = shlex.split(line)
        for option, value in pairwise(words):
            if option.startswith("-"):
                found.setdefault(option, {})[value] = None
    return {option: tuple(values) for option, values in found.items()}


@cache
def _device_keys() -> tuple[str, ...]:
    return tuple(dict.fromkeys(key for name in list_devices() for key, _ in load_device(name).facts()))


@cache
def _tiling_values() -> tuple[str, ...]:
    """Return every field of every schedule with each of its choices, its default and odd values."""
    fields = {field for schedule in SCHEDULES.values() for field in tiling_fields(schedule.tiling)}
    found = [f"{f.name}={value}" for f in fields for value in (*f.choices, f.default) if value is not None]
    return (*sorted(set(found)), *sorted({f"{f.name}={v}" for f in fields for v in SCALARS}))


@cache
def _presets() -> tuple[str, ...]:
    precisions = {name: p for schedule in SCHEDULES.values() for name, p in schedule.precisions.items()}
    fields = sorted({field for p in precisions.values() for field in p.formats()})
    changes = [f"{field}={value}" for field in fields for value in ("float16", "float32", "x", "")]
    return (*precisions, *changes, *(f"{name},{change}" for name in precisions for change in changes))


@cache
def _plausible(name: str) -> tuple[str, ...]:
    return tuple(shlex.split(PLAUSIBLE.get(name, "")))


def right(param: Any, rng: random.Random) -> str:
    """Draw a value that looks right for an option or an argument."""
    choices = [c for c in typing.get_args(param.type_descriptor.annotation) if isinstance(c, str)]
    if choices:
        return rng.choice(choices)
    match param.name:
        case "overrides":
            return f"{rng.choice(_device_keys())}={rng.choice(SCALARS)}"
        case "tiling":
            return ",".join(rng.sample(_tiling_values(), rng.choice((1, 1, 2))))
        case "precision":
            return rng.choice(_presets())
        case "fields":
            name, _, value = rng.choice(_tiling_values()).partition("=")
            return f"{name}={rng.choice((value, f'{value},{value}', '16:64:16', '128', '1,2'))}"
    values = _plausible(param.name) or sum((seen().get(o, ()) for o in param.opts), ()) or ("x",)
    return rng.choice(values)


def launch(rng: random.Random) -> tuple[str, tuple[str, ...]]:
    """Draw a launch of a Triton kernel, right or with expressions exchanged, and the options of its problem."""
    text, options = rng.choice(list(LAUNCHES.items()))
    head, _, arguments = text.partition("](")
    kernel, _, grid = head.partition("[")
    parts = [grid, *re.split(r", (?![^(]*\))", arguments[:-1])]
    odd = (*_EXPRESSIONS.split(), *parts, "+".join("1" * 5000), "(" * 300)
    for _ in range(rng.choice((0, 1, 1, 2))):
        at = rng.randrange(len(parts))
        name, equals, _ = parts[at].rpartition("=") if at else ("", "", "")
        change = rng.choice(odd)
        parts[at] = change if "=" in change else f"{name}{equals}{change}"
    return f"{kernel}[{parts[0]}]({', '.join(parts[1:])})", options


@cache
def _names(template: Path, ending: str) -> tuple[str, ...]:
    """Return the names of the template's files that end so; no draw writes a file there."""
    return tuple(sorted(p.name for p in template.iterdir() if p.name.endswith(ending)))


@cache
def _weighted() -> list[tuple[tuple[str, ...], Any]]:
    """Return each verb with its command, as often as it is drawn."""
    return [v for v in verbs().items() for _ in range(_WEIGHTS.get(v[0], 1) + len(v[1].params) // 6)]


class _Draw:
    """Puts one command together."""

    def __init__(self, number: int, template: Path) -> None:
        self.rng, self.template = random.Random(number), template
        self.files: dict[str, bytes] = {}

    def value(self, param: Any) -> str:
        """Draw a value: right, odd, or the name of a file, whole or damaged."""
        kind = self.rng.random()
        if kind < 0.6:
            return right(param, self.rng)
        if kind < 0.75:
            return self.rng.choice(ODD)
        return self.file(self._extension(param) if self.rng.random() < 0.85 else "")

    def _extension(self, param: Any) -> str:
        """Return the ending of the files that an option or argument takes, as its right values have it."""
        return Path(right(param, self.rng)).suffix

    def file(self, ending: str) -> str:
        name = self.rng.choice(_names(self.template, ending) or _names(self.template, ""))
        source = self.template / name
        if self.rng.random() < 0.3 or not source.is_file() or source.stat().st_size > 1 << 20:
            return name
        damaged = f"damaged{source.suffix}"
        self.files[damaged] = damage(source, self.rng)
        return damaged

    def drawn(self) -> Drawn:
        rng = self.rng
        path, command = rng.choice(_weighted())
        if rng.random() < 0.01:
            path = (*path[:-1], rng.choice(ODD))
        arguments = [p for p in command.params if p.param_type_name == "argument"]
        options = [p for p in command.params if p.param_type_name == "option" and p.name not in _LONG]
        words: list[str] = []
        if "schedule" in {a.name for a in arguments} and rng.random() < 0.25:
            name, sizes = launch(rng)
            jobs = ["-j1", "-f", "warps=4,8"] if any(p.name == "jobs" for p in options) else []
            option = self._option(rng.choice(options)) if rng.random() < 0.3 else []
            device = ["--hw", rng.choice(("h200", "ascend_910b2", "t4"))] if rng.random() < 0.7 else []
            return Drawn((*path, name, *sizes, *jobs, *device, *option), self.files, "file")
        for argument in arguments:
            count = rng.choice((1, 2, 2, 3)) if argument.nargs == -1 else 1
            words += [self.value(argument) for _ in range(count if rng.random() < 0.97 else 0)]
        names = {p.name for p in options}
        chosen = rng.choices(options, k=min(len(options), rng.choice((0, 1, 1, 2, 2, 3, 5)))) if options else []
        for option in chosen:
            words += self._option(option)
        given = {p.name for p in chosen}
        if "lengths" in names and rng.random() < 0.15:
            for served, values in rng.sample(_SERVED, rng.choice((1, 2, 3))):
                words += [served, rng.choice(values)]
            given.add("seq")
        if "seq" in names and "config" not in {a.name for a in arguments} and not given & {"seq", "tensors", "problem"}:
            words += ["--seq", "128"]
        if "jobs" in names and "jobs" not in given:
            words.append("-j1")
        stdout = rng.choice(("file",) * 38 + ("closed", "full"))
        return Drawn((*path, *words), self.files, stdout)

    def _option(self, option: Any) -> list[str]:
        name = self.rng.choice([*option.opts, *option.secondary_opts])
        if option.is_flag:
            return [f"{name}={self.rng.choice(ODD)}" if self.rng.random() < 0.03 else name]
        joined = self.rng.random() < 0.15 and name.startswith("--")
        value = self.value(option)
        return [f"{name}={value}"] if joined else [name, value]


def draw(number: int, template: Path) -> Drawn:
    """Return the command of a number; ``template`` is the folder whose files it names or damages."""
    return _Draw(number, template).drawn()


def damage(source: Path, rng: random.Random) -> bytes:
    """Return a file's bytes, wrong in one way: cut, or bytes, a value, a line or an array changed."""
    data = source.read_bytes()
    if source.suffix == ".sqlite":
        return _changed_store(source, rng)
    if source.suffix == ".npz" and rng.random() < 0.5 and source.name not in ("huge.npz", "zero.npz"):
        try:
            return _changed_arrays(source, rng)
        except (OSError, ValueError, zipfile.BadZipFile):
            pass  # odd already
    try:
        text = data.decode()
    except UnicodeDecodeError:
        text = ""
    kind = rng.random()
    if text and kind < 0.7:
        return _changed_text(text, rng).encode("utf-8", "surrogatepass")
    if kind < 0.8 or not data:
        return data[: rng.randrange(len(data) + 1)]
    changed = bytearray(data)
    if kind < 0.9:  # digits of a header
        places = [m.start() for m in re.finditer(rb"[0-9]", data[:2000])] or [0]
        changed[rng.choice(places)] = rng.choice(b"0123456789-")
        return bytes(changed)
    for _ in range(rng.choice((1, 1, 4, 100))):
        changed[rng.randrange(min(len(data), rng.choice((64, 1000, len(data)))))] = rng.randrange(256)
    return bytes(changed)


def _changed_text(text: str, rng: random.Random) -> str:
    values = list(re.finditer(r"(?<=[:,\[ ])\s*([^\s:,\[\]{}]+)(?=[,\]}\n])", text))
    lines = text.splitlines(keepends=True)
    at = rng.randrange(len(lines)) if lines else 0
    match rng.randrange(6):
        case 0:
            return "".join(lines[:at] + lines[at + 1 :])
        case 1:
            return "".join([*lines[:at], lines[at] if lines else "", *lines[at:]])
        case 2 if lines:
            return "".join([*lines[:at], rng.choice(ODD), "\n", *lines[at:]])
        case _ if values:
            found = rng.choice(values)
            return text[: found.start(1)] + rng.choice(SCALARS) + text[found.end(1) :]
    return text + rng.choice(SCALARS)


def _changed_store(source: Path, rng: random.Random) -> bytes:
    """Return a store in which a value is another, a column of another name or a table gone."""
    copy = source.with_name(f".{rng.random()}")
    shutil.copyfile(source, copy)
    connection = sqlite3.connect(copy)
    try:
        table = rng.choice(
            sorted(row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type='table'"))
        )
        column = rng.choice([row[1] for row in connection.execute(f"PRAGMA table_info({table})")])
        match rng.randrange(4):
            case 0:
                connection.execute(f"DROP TABLE {table}")
            case 1:
                connection.execute(f"ALTER TABLE {table} RENAME COLUMN {column} TO other")
            case _:
                connection.execute(
                    f"UPDATE OR REPLACE {table} SET {column} = ?", (rng.choice((*SCALARS, None, 1, b"\xff")),)
                )
        connection.commit()
    except sqlite3.Error:  # a column that nothing else may stand in: the store is as it was
        pass
    finally:
        connection.close()
    data = copy.read_bytes()
    copy.unlink()
    return data


def _changed_arrays(source: Path, rng: random.Random) -> bytes:
    """Return an ``.npz`` in which one array is gone, of another shape or of another type."""
    with np.load(source) as archive:
        arrays = {name: archive[name] for name in archive.files}
    name = rng.choice(sorted(arrays))
    array = arrays.pop(name)
    types = ("int8", "float64", "complex64", "bool", "U4", "S4", ">f4", "uint16", "M8[s]")
    other = rng.choice(ODD[7:40]).replace("/", "") + name[1:]
    changes: tuple[Callable[[], Any], ...] = (
        lambda: None,
        lambda: arrays.update({other: array}),
        array.ravel,
        lambda: array[None],
        lambda: array[:0] if array.ndim else np.zeros(0),
        lambda: array[..., :0] if array.ndim else array,
        lambda: np.stack([array, array], -1),
        lambda: array.ravel()[: array.size // 2],
        lambda: np.array(3),
        lambda: array.T,
        lambda: array.astype(rng.choice(types)),
        lambda: np.full(array.shape, np.nan),
        lambda: np.full(array.shape, 2**63 - 1),
    )
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        changed = rng.choice(changes)()
    if changed is not None:
        arrays[name] = changed
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def write_template(folder: Path) -> Path:
    """Fill a folder with files to name and to damage: odd ones, and what npusim reads and writes; return it."""
    write_odd_files(folder)
    (folder / "mine").rename(folder / "thesis")
    with np.load(folder / "ok.npz") as ok:
        tensors = dict(ok)
    save_file(tensors, folder / "ok.safetensors")
    np.savez(folder / "o.npz", o=np.ones((1, 1, 64, 16), "float16"))
    shutil.copy(packaged_folder("hwconfigs") / "ascend_910b2.yaml", folder / "own.yaml")
    (folder / "changed.yaml").write_text("extends: h200\nclock_hz: {value: 1 GHz, basis: assumed, source: s}\n")
    (folder / "base.yaml").write_text((folder / "base_new.yaml").read_text())
    (folder / "best.yaml").write_text(
        "schema: npusim.decision/1\nhw: ascend_910b2\nworkload: pangu_38b\nseq: 64\ncandidates:\n"
        "- {schedule: flash, fields: {depth: [1, 2]}}\n- {schedule: pasa, fields: {block_kv: [64, 128]}}\n"
    )
    (folder / "PipeUtilization.csv").write_text("")
    shutil.copytree(TESTS / "validate" / "profiles", folder, dirs_exist_ok=True)
    for name, own in (("attention.py", "kernels.py"), ("plain.py", "plain_kernels.py")):
        shutil.copy(TESTS / "ttir" / own, folder / name)
    (folder / "mapping.yaml").write_text(CliRunner().invoke(app, ["import", "--template"]).stdout)
    here = Path.cwd()
    os.chdir(folder)
    try:
        with pytest.MonkeyPatch.context() as patched:
            declare_tiles(patched)  # what is drawn reads these files, whatever tile their runs have
            for line in _WRITING.splitlines():
                done = CliRunner().invoke(app, line.split(), env={"CI": ""})
                assert done.exit_code == 0, done.stderr
    finally:
        os.chdir(here)
    for name in ("result.json", "figures.json", "pipes.csv"):
        shutil.copy(folder / "one" / name, folder / name)
    (folder / "loop").symlink_to("loop")
    (folder / "dangling.yaml").symlink_to("gone.yaml")
    (folder / "zero.npz").symlink_to("/dev/zero")
    return folder
