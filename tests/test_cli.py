"""The command line as people and scripts meet it: words, streams, exit codes."""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import pty
import re
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree
from zipfile import ZipFile

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import npusim.cli
from npusim import __version__, run
from npusim.cli.app import VERBS as GROUPS
from npusim.cli.app import app
from npusim.cli.help import Verbs
from npusim.config.load import list_devices, list_workloads, load_device
from npusim.config.node_file import list_nodes
from npusim.errors import ContradictionError, SpecError
from npusim.machines.ascend.ascend_pricing import EnginePricing
from npusim.report.result_json import load_result
from npusim.studies.explore import search as search_module
from npusim.studies.explore.store import read_store

if TYPE_CHECKING:
    from typer.testing import Result

REPOSITORY = Path(__file__).resolve().parents[1]
COMMAND = (sys.executable, "-c", "from npusim.cli import main; main()")
QUICK = ("--seq", "256", "--no-numerics")
#: Seconds after which a process hangs, however crowded the machine is.
HUNG_S = 900
VERBS = (
    "run",
    "compare",
    "diff",
    "explore",
    "check",
    "hw list",
    "hw show",
    "hw schema",
    "hw validate",
    "workload list",
    "workload show",
    "workload schema",
    "workload import",
    "new schedule",
)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder, outside CI."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    return tmp_path


def _npusim(*arguments: str, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(app, list(arguments), env=env)


def _ok(*arguments: str) -> str:
    result = _npusim(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


LISTS, RUNS = "workload list", "run flash --seq 256 --no-numerics --no-save"


@pytest.mark.parametrize(
    ("verb", "streams", "code"),
    [
        *((LISTS, ">&-", 0), (LISTS, "2>&-", 0), (LISTS, "| true", 1), (LISTS, ">/dev/full", 2)),
        *((LISTS, "<&- >&- 2>&-", 0), (RUNS, "<&- >&- 2>&-", 0), (LISTS, "2>/dev/full", 0)),
        *((RUNS, "| true", 1), (RUNS, ">/dev/full", 2)),
        *(pytest.param(RUNS, s, 0, marks=pytest.mark.exhaustive) for s in (">&-", "2>&-", "2>/dev/full")),
    ],
)
def test_streams_that_are_closed_or_full_are_no_crash(verb: str, streams: str, code: int) -> None:
    """A reader that has enough (SIGPIPE) ends the command in silence."""
    script = f'"$@" {verb} {streams}; exit "${{PIPESTATUS[0]}}"'
    done = subprocess.run(["bash", "-c", script, "bash", *COMMAND], capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert "Traceback" not in done.stdout + done.stderr
    assert done.stderr.count("npusim: error: No space left on device") == (streams == ">/dev/full")


def _document(*arguments: str) -> dict[str, Any]:
    found = json.loads(_ok(*arguments))
    assert isinstance(found, dict)
    assert found["schema_version"] == (2 if found["kind"] == "npusim.compare" else 1)
    return found


def _error(*arguments: str) -> str:
    result = _npusim(*arguments)
    assert result.exit_code == 2, result.output
    assert re.search("^npusim: error: ", result.stderr, re.MULTILINE)  # work of seconds is said before
    assert "Traceback" not in result.stderr
    return result.stderr


def test_a_contradiction_says_whose_fault_it_is_and_saves_what_a_report_needs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def contradict(_result: object) -> None:
        raise ContradictionError("9 cycles are fewer than the bound of hbm, 10")

    monkeypatch.setattr("npusim.simulation.simulate.check_sanity", contradict)
    archive = tmp_path / "fault.zip"
    _ok("new", "schedule", "OWN")
    words = ["run", "OWN.py:OWN", *QUICK, "--no-save"]
    monkeypatch.setattr("sys.argv", ["npusim", *words])
    message = _error(*words)
    assert "a contradiction in npusim itself" in message
    assert f"npusim --save-report fault.zip {' '.join(words)}" in message
    _error("--save-report", str(archive), *words)
    with ZipFile(archive) as saved:
        names = saved.namelist()
        assert names == ["command.txt", "error.txt", "versions.txt", "files/0-OWN.py"]
        assert "fewer than the bound of hbm" in saved.read("error.txt").decode()


# ---------------------------------------------------------------- start


def test_help_says_the_same_where_python_drops_docstrings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "82")  # the runner's 80, and a margin
    code = (
        "import contextlib, sys; from typer.main import get_command; from npusim.cli.app import app\n"
        "for words in sys.argv[1:]:\n"
        "    with contextlib.suppress(SystemExit): get_command(app)([*words.split(), '--help'], 'npusim')\n"
    )
    asked = ["", "hw", "workload", "new", "report", "invariant", "validate", "layout", "format", "help", *VERBS]
    done = subprocess.run([sys.executable, "-OO", "-c", code, *asked], capture_output=True, text=True, check=True)
    told = [CliRunner().invoke(app, [*words.split(), "--help"], prog_name="npusim").stdout for words in asked]
    assert done.stdout == "".join(told)


def test_help_is_there_at_once_and_loads_nothing_heavy() -> None:
    heavy = "numpy numba networkx pandas plotly simpy pydantic rich npusim.cli.run_command npusim.cli.hw_command"
    code = (
        "import sys; sys.argv = ['npusim', '--help']\n"
        "from npusim.cli import main\n"
        "try: main()\n"
        f"finally: sys.stderr.write(' '.join(m for m in '{heavy}'.split() if m in sys.modules))"
    )
    times = []
    for _ in range(3):
        start = os.times()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        end = os.times()
        times.append(end.children_user - start.children_user)  # of processors, however busy they are
        assert done.stderr == ""
        assert "Examples:" in done.stdout
    assert min(times) <= 0.4


def test_a_verb_is_imported_where_it_is_called_and_only_what_a_run_reads() -> None:
    """One run: no file of another verb, and nothing of Triton's compilers, of GPUs or of nodes on an Ascend NPU."""
    code = (
        "import sys; sys.argv = 'npusim run flash --seq 128 --tp 8 --no-numerics --no-save'.split()\n"
        "from npusim.cli import main\n"
        "try: main()\n"
        "finally: sys.stderr.write('\\n' + ' '.join(m for m in sys.modules if m.startswith('npusim.')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = set(done.stderr.splitlines()[-1].split())
    assert {m for m in modules if re.fullmatch(r"npusim\.cli\.\w+_commands?", m)} == {"npusim.cli.run_command"}
    assert not {m for m in modules if re.match(r"npusim\.(kernels\.t\w+\.|machines\.(sm|node)\.|studies\.)", m)}


#: A tile of which nothing is left to choose: without compiled code each other one takes as long as the run.
TILE = "block_q=128,block_kv=256,depth=1,kernel=tilelang,deal=round_robin"
#: Options of a run without compiled code, and how it ends.
UNCOMPILED = ((("--no-numerics", "--method", "des"), 0), (("--no-numerics",), 2), (("--method", "des"), 2))


@pytest.fixture(scope="module", params=["llvmlite is not installed", "NUMBA_DISABLE_JIT is set"])
def uncompiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[Path]]:
    """What compiled code lacks, and the folders with code, stdout and stderr of runs with the options of `UNCOMPILED`.

    Each in a copy of a process that has imported what runs need.
    """
    lacks, folder = request.param, tmp_path_factory.mktemp("uncompiled")
    script = (
        "import os, sys\n"
        "class Missing:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'llvmlite': raise ModuleNotFoundError(name, name=name)\n"
        "if 'NUMBA_DISABLE_JIT' not in os.environ: sys.meta_path.insert(0, Missing())\n"
        "import npusim.cli.app, npusim.report.output, npusim.report.tables, npusim.run, npusim.simulation.request\n"
        f"for number, (options, _) in enumerate({UNCOMPILED}):\n"
        "    os.mkdir(str(number))\n"
        "    if not os.fork():\n"
        "        os.chdir(str(number))\n"
        "        for stream, name in ((1, 'stdout'), (2, 'stderr')):\n"
        "            os.dup2(os.open(name, os.O_CREAT | os.O_WRONLY), stream)\n"
        "        sys.argv = ['npusim', 'run', 'flash', '--seq', '256', '--tp', '8', '--full']\n"
        f"        sys.argv += ['-t', '{TILE}', *options]\n"
        "        npusim.cli.main()\n"
        "    with open(f'{number}/code', 'w') as file: file.write(str(os.waitstatus_to_exitcode(os.wait()[1])))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "NPUSIM_CACHE": str(folder)}
    if lacks.startswith("NUMBA"):
        environment["NUMBA_DISABLE_JIT"] = "1"
    subprocess.run([sys.executable, "-c", script], env=environment, cwd=folder, check=True, timeout=HUNG_S)
    return lacks, [folder / str(number) for number in range(len(UNCOMPILED))]


@pytest.mark.parametrize("number", range(len(UNCOMPILED)), ids=[" ".join(options) for options, _ in UNCOMPILED])
def test_without_compiled_code_the_reference_runs_and_all_else_says_why_not(
    number: int, uncompiled: tuple[str, list[Path]]
) -> None:
    (lacks, folders), (_, code) = uncompiled, UNCOMPILED[number]
    ended, stdout, stderr = ((folders[number] / name).read_text() for name in ("code", "stdout", "stderr"))
    assert int(ended) == code, stderr
    assert ("des, exact" in stdout) == (code == 0)
    # Work of seconds is said before.
    assert not code or re.search(f"^npusim: error: {lacks}", stderr, re.MULTILINE), stderr


@pytest.mark.parametrize("verb", VERBS)
def test_every_help_has_an_example_that_names_the_verb(verb: str) -> None:
    text = _ok(*verb.split(), "--help")
    assert f"  npusim {verb}" in text.partition("Examples:")[2]
    assert not re.search(r"\[/?(bold|dim)\]", text)


def test_the_menu_has_every_verb_once_in_groups_of_at_most_seven_a_line_each() -> None:
    modules = [importlib.import_module(f"npusim.cli.{m.name}") for m in pkgutil.iter_modules(npusim.cli.__path__)]
    named: list[object] = []
    for apps in {id(v): v for m in modules for v in vars(m).values() if isinstance(v, Verbs) and v is not app}.values():
        named += (
            [apps.info.name] if isinstance(apps.info.name, str) else [verb.name for verb in apps.registered_commands]
        )
    visible = set(named)
    assert len(named) == len(visible)
    listed = [name for verbs in GROUPS.values() for name in verbs]
    assert {*listed} == visible
    group = get_command(app)
    assert all(command.name == name for name, command in group.commands.items())  # type: ignore[attr-defined]
    assert len(listed) == len(visible)
    assert max(map(len, GROUPS.values())) <= 7
    lines = _ok("--help").splitlines()
    for title, verbs in GROUPS.items():
        first = lines.index(f"{title}:") + 1
        assert [line.split()[0] for line in lines[first : first + len(verbs)]] == [*verbs]
        assert all(len(line) <= 80 for line in lines[first : first + len(verbs)])
        assert lines[first + len(verbs)] == ""


def test_version() -> None:
    assert _ok("--version") == f"npusim {__version__}\n"


@pytest.mark.parametrize("arguments", [("rnu",), ("run", "flash", "--sqe", "1"), ("run", "flash", "--seq", "x")])
def test_unknown_verbs_and_options_exit_with_2(arguments: tuple[str, ...]) -> None:
    result = _npusim(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""


# ---------------------------------------------------------------- run


def test_run_prints_the_table_and_writes_the_folder() -> None:
    result = _npusim("run", "flash", *QUICK)
    assert result.exit_code == 0
    assert "flash on ascend_910b2" in result.stdout
    assert "wrote" not in result.stdout, "what is no result goes to stderr"
    wrote = r"wrote (\S+)/  \(figures\.json pipes\.csv result\.json trace\.json\)"
    match = re.search(wrote, result.stderr)
    assert match
    # What the name does not say (no bits) is in a digest.
    assert re.fullmatch(r"runs/flash-pangu_38b-256-ascend_910b2-[0-9a-f]{6}", match[1])
    assert "\x1b" not in result.stdout
    assert load_result(match[1]).timing is not None


def test_checks_are_told_to_continuous_integration(elsewhere: Path) -> None:
    base = "schema: npusim.baseline/1\nschedule: flash\nhw: ascend_910b2\nworkload: pangu_38b\nseq: 1k\n"
    (elsewhere / "b").mkdir()
    for name, more in (("fine", ""), ("odd", "tiling: {block_kv: 17}\n")):
        (elsewhere / "b" / f"{name}.yaml").write_text(base + more)
    _npusim("check", "b", "--update")
    assert "seq: 1k" in (elsewhere / "b" / "fine.yaml").read_text()
    result = _npusim("check", "b", "--github", "--junit", "out.xml")
    assert result.exit_code == 1
    assert "::error file=b/odd.yaml,title=odd%3A failed::block_kv: 17 must be" in result.stderr
    device = (
        "schema: npusim.device/1\nname: mine\ndescription: d\nextends: {file: ascend_910b2, basis: assumed}\nclok: 1\n"
    )
    (elsewhere / "b" / "mine.yaml").write_text(device)  # the faulty file is annotated, not the case that reads it
    (elsewhere / "case.yaml").write_text(base.replace("ascend_910b2", "b/mine.yaml"))
    faulty = _npusim("check", "case.yaml", "--github")
    assert "::error file=b/mine.yaml,line=5,title=case%3A failed::b/mine.yaml:5 clok: unknown key" in faulty.stderr
    suite = ElementTree.parse(elsewhere / "out.xml").getroot()
    assert {k: suite.get(k) for k in ("tests", "failures", "errors")} == {"tests": "2", "failures": "0", "errors": "1"}
    assert [case.get("name") for case in suite if len(case)] == ["odd"]


def test_words_of_a_command_are_the_same_everywhere(elsewhere: Path) -> None:
    (elsewhere / "mine.yaml").write_text(
        "schema: npusim.device/1\nname: mine\ndescription: d\nextends: {file: ascend_910b2, basis: assumed}\n"
    )
    assert "ascend_910b2 -> mine" in _ok("compare", "flash", "flash --hw mine.yaml", *QUICK)
    assert ". Did you mean `flash`? Allowed: " in _npusim("run", "flahs").stderr
    assert "--band x: write a share from 0 to less than 1:" in _npusim("validate", "mine.yaml", "--band", "x").stderr
    assert run("flash", seq="1k", numerics=False).problem.seq_q == 1024  # type: ignore[arg-type,union-attr]
    with pytest.raises(SpecError, match="seq_kv 8q: write a positive whole number"):
        run("flash", seq_kv="8q")  # type: ignore[arg-type]
    module = subprocess.run([sys.executable, "-m", "npusim", "--version"], capture_output=True, text=True, check=True)
    assert module.stdout == f"npusim {__version__}\n"


def test_what_differs_is_written_beside_and_the_last_runs_have_short_names(elsewhere: Path) -> None:
    asked = [(), ("--l2", "warm"), ("-t", "depth=3"), ("--hw", "ascend_910b3"), ("--phase", "decode"), ("--batch", "2")]
    for options in (*asked, ("-t", "depth=3")):
        _ok("run", "flash", *QUICK, "--no-trace", *options)
    _ok("run", "gemm", "--problem", "m=64,n=64,k=64", "--no-numerics", "--no-trace")
    folders = sorted(path.name for path in (elsewhere / "runs").iterdir())
    assert len(folders) == len(asked) + 1, "the same run takes the place of the earlier one, another never"
    names = [re.sub("-[0-9a-f]{6}$", "", name) for name in folders]
    assert set(names) == {
        "flash-pangu_38b-1x256-ascend_910b2",
        "flash-pangu_38b-256-ascend_910b2",
        "flash-pangu_38b-256-ascend_910b3",
        "gemm-m64n64k64-ascend_910b2",
    }
    document = _document("compare", "flash@2", "flash@1", "--json")
    assert document["runs"][1].startswith("flash-pangu_38b-256-ascend_910b2-")
    assert "has flash@1 to flash@6" in _npusim("compare", "flash@7", "@1").stderr
    other = ("run", "pasa", *QUICK, "-o", f"runs/{folders[0]}")
    assert "contains another run;" in _npusim(*other).stderr
    _ok(*other, "--force")
    assert load_result(f"runs/{folders[0]}").schedule == "pasa"


def test_run_json_is_the_file(elsewhere: Path) -> None:
    document = _document("run", "flash", *QUICK, "--json", "--out", "a", "--no-trace")
    assert document == json.loads((elsewhere / "a" / "result.json").read_text())
    assert document["kind"] == "npusim.run"


def test_options_reach_the_run() -> None:
    document = _document(
        "run",
        "flash",
        "-w",
        "llama2_70b",
        "--seq-q",
        "128",
        "--seq-kv",
        "256",
        "--batch",
        "2",
        "--tp",
        "4",
        "--no-causal",
        "--hw",
        "ascend_910b1",
        "-C",
        "clock_hz=1e9",
        "-C",
        "group_count=3",
        "-t",
        "block_kv=128,depth=1",
        "-t",
        "block_q=64",
        "--precision",
        "fa2_fp32",
        "--method",
        "block",
        "--rows",
        "0,100-101",
        "--heads",
        "0,2",
        "--seed",
        "3",
        "--no-save",
        "--json",
    )
    problem, tiling = document["problem"], document["tiling"]
    assert (problem["batch"], problem["heads"], problem["kv_heads"]) == (2, 16, 2)
    assert (problem["seq_q"], problem["seq_kv"], problem["causal"]) == (128, 256, False)
    assert (tiling["block_q"], tiling["block_kv"], tiling["depth"]) == (64, 128, 1)
    assert (document["device"]["name"], document["device"]["clock_hz"]) == ("ascend_910b1", 1e9)
    assert document["device"]["group_count"] == 3
    assert document["timing"]["method"] == "block"
    assert document["precision"] == "fa2_fp32"
    assert "2 of 16 heads" in document["numerics"]["sample"]


def test_trace_of_chosen_groups(elsewhere: Path) -> None:
    _ok("run", "flash", *QUICK, "--trace-groups", "1,2", "-o", "a")
    names = {path.name for path in (elsewhere / "a").iterdir()}
    assert names == {"result.json", "figures.json", "pipes.csv", "trace.json"}
    events = json.loads((elsewhere / "a" / "trace.json").read_text())["traceEvents"]
    cores = {e["args"]["name"].partition(".")[0] for e in events if e["name"] == "process_name"}
    assert cores == {"core1", "core2"}


@pytest.mark.parametrize("columns", [60, 100])
def test_columns_wrap_between_words_and_commands_stay_whole(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of tables and help; only a word that is longer runs over, and what is to be copied."""
    monkeypatch.setenv("COLUMNS", str(columns))
    for arguments in (
        ("run", "flash", *QUICK, "--no-save"),
        ("hw", "validate", "ascend_910b2"),
        ("hw", "list"),
        ("workload", "show", "llama2_70b"),
        ("run", "--help"),
        ("validate", "--help"),
    ):
        # Not by CliRunner, which sets a width of its own.
        with pytest.raises(SystemExit) as ended:
            app(list(arguments))
        assert ended.value.code == 0
        wide = [line for line in capsys.readouterr().out.splitlines() if len(line) > columns]
        # A grid of numbers can give no more, a key no less.
        allowed = ("npusim ", "%", "_", "share")
        assert [line for line in wide if not any(mark in line for mark in allowed)] == []
        assert not any("#" in line for line in wide), "what an example does goes below it"
    monkeypatch.delenv("COLUMNS")
    whole = _ok("hw", "show", "ascend_910b2", "--sources")
    assert any(len(line) > 100 for line in whole.splitlines()), "a file gets whole lines"


def test_no_save_writes_nothing(elsewhere: Path) -> None:
    _ok("run", "flash", *QUICK, "--no-save")
    assert not list(elsewhere.iterdir())


def test_tensors_of_ones_own_give_an_output_file(elsewhere: Path) -> None:
    import numpy as np

    rng = np.random.default_rng(0)
    tensors = {n: rng.standard_normal((1, 1, 64, 16), np.float32).astype("float16") for n in "qkv"}
    np.savez(elsewhere / "qkv.npz", **tensors)  # type: ignore[arg-type]
    document = _document("run", "flash", "--tensors", "qkv.npz", "--rows", "all", "--causal", "--json", "-o", "a")
    assert document["numerics"]["sample"] == "all 64 rows"
    assert document["numerics"]["rmse"] <= 1e-3
    assert (elsewhere / "a" / "output.safetensors").is_file()


def test_schedules_and_their_fields_are_listed() -> None:
    assert "flash" in _error("run")
    assert "which schedule? For example: npusim explore" in _error("explore")
    text = _ok("run", "flash", "--fields")
    assert "block_kv" in text
    assert "fa2_fp32" in text
    document = _document("run", "flash", "--fields", "--json")
    assert document["tiling"][0]["name"] == "block_q"


def test_products_and_copies_run_from_their_sizes() -> None:
    arguments = ("run", "gemm", "--no-save", "--problem", "m=128,n=256,k=64")
    document = _document(*arguments, "--json")
    assert document["problem"] == {"m": 128, "n": 256, "k": 64, "count": 1, "dtype": "float16", "operands": "nd"}
    assert document["timing"]["flops"] == 2 * 128 * 256 * 64
    assert "m128 n256 k64 float16" in _ok(*arguments)
    text = _ok("run", "copy", "--no-save", "--problem", "bytes=1048576")
    assert "problem    1 MiB" in text
    assert "TFLOP/s" not in text
    assert "cubecore0" not in text, "cores without work have no rows"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gemm", "--problem", "m=1"), "write m=..,n=..,k=.."),
        (("gemm", "--problem", "m=1,n=0,k=1"), "n must be a positive whole number"),
        (("flsh",), "Did you mean `flash`?"),
        (("flash", "-t", "block_kv=100"), "nearest: 96 or 112"),
        (("flash", "-t", "blok=1"), "blok: unknown tiling field"),
        (("flash", "-t", "block_q"), "-t block_q: write -t key=value"),
        (("flash", "-t", "block_q=512", "-t", "block_kv=512", "-t", "vector_rows=16"), "bytes needed"),
        (("flash", "--hw", "ascend_910b"), "no device or node named 'ascend_910b'. Did you mean"),
        (("flash", "--hw", "none.yaml"), "no such device or node file"),
        (("flash", "-w", "pangu"), "no workload named 'pangu'"),
        (("flash", "-C", "clock=1"), "Did you mean `clock_hz`?"),
        (("flash", "-C", "clock_hz"), "-C clock_hz: write -C key=value"),
        (("flash", "--tp", "7"), "possible: 1 2 4 5 8 10 20 40"),
        (("flash", "--precision", "x"), "precision 'x'"),
        (("flash", "--method", "x", "--no-save"), "method 'x'"),
        (("flash", "--rows", "x"), "write sample, all, or numbers"),
        (("flash", "--heads", "3-1"), "the last number is smaller than the first"),
        (("flash", "--trace-groups", "all"), "write last, or numbers such as"),
        (("flash", "--tensors", "none.npz"), "none.npz: no such file"),
    ],
)
def test_bad_input_is_said_on_stderr_with_exit_code_2(
    arguments: tuple[str, ...], message: str, elsewhere: Path
) -> None:
    result = _npusim("run", *arguments)
    assert result.exit_code == 2
    assert re.search("^npusim: error: ", result.stderr, re.MULTILINE)  # work of seconds is said before
    assert message in result.stderr
    assert result.stdout == ""
    assert not (elsewhere / "runs").exists(), "nothing half written"


def test_unwritable_folder_is_refused_before_the_simulation(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (elsewhere / "file").write_text("")

    def never(*_: object, **__: object) -> None:
        raise AssertionError("simulated")

    monkeypatch.setattr(importlib.import_module("npusim.simulation.simulate"), "run_plan", never)
    assert "file" in _error("run", "flash", "--out", "file/a")
    (elsewhere / "mine").mkdir()
    (elsewhere / "mine" / "thesis.tex").write_text("")
    assert "contains 'thesis.tex'" in _error("run", "flash", "--out", "mine")


# ---------------------------------------------------------------- compare, explore, check


def test_compare_shows_what_changed() -> None:
    for name, keys in (("a", 512), ("b", 256)):
        tile = f"block_q=128,block_kv={keys},depth=2,vector_rows=8"
        _ok("run", "flash", *QUICK, "-t", tile, "-o", name, "--no-trace")
    text = _ok("compare", "a", "b/result.json")
    assert "tiling.block_kv  512 -> 256" in text
    assert "cycles  " in text
    document = _document("compare", "a", "b", "--json")
    assert document["differences"] == {"tiling.block_kv": [512, 256]}
    assert "cannot be read" in _error("compare", "a", "nope/b")


def test_compare_runs_schedules_on_the_spot_with_options_of_their_own() -> None:
    found = _document("compare", "flash", "flash -t block_kv=128 --seq 64", *QUICK, "-t", "depth=1", "--json")
    assert found["runs"] == ["flash", "flash -t block_kv=128 --seq 64"]
    assert found["problems"] == ["problem.seq_q", "problem.seq_kv"]
    assert found["differences"]["tiling.block_kv"] == [256, 128]
    assert "tiling.depth" not in found["differences"]
    parts = found["latency"]["parts"]
    assert [sum(p["cycles"][i] for p in parts) for i in (0, 1)] == found["latency"]["cycles"]
    assert _ok("compare", "flash", "pasa", *QUICK, "--markdown").startswith("### flash -&gt; pasa\n")


def test_diff_says_what_is_equal_and_names_what_explains_the_rest(elsewhere: Path) -> None:
    small = ("flash", "--hw", "h200", "--seq-q", "16", "--seq-kv", "64", "--no-causal", "--rows", "all", "--heads", "0")
    _ok("run", *small, "-o", "kernel", "--save-output", "--precision", "running=float16")
    out = "kernel/output.safetensors"
    same = _document("diff", out, *small, "--precision", "running=float16", "--json")
    assert (same["matched"], same["first"], same["passed"]) == (same["total"], None, True)
    text = _ok("diff", out, *small)
    assert re.search(r"explained by\s+running=float16", text)
    assert re.search(r"first\s+batch 0 head 0 row \d+ column \d+: \S+ given, \S+ predicted", text)
    assert re.search(r"first at attention: ", text)


def test_explore_ranks_points_and_keeps_misfits(elsewhere: Path) -> None:
    arguments = ("explore", "flash", "-f", "block_kv=256,512", "-f", "block_q=128,2048", "--seq", "256", "-j1")
    result = _npusim(*arguments)
    assert result.exit_code == 0
    assert "B1 N5 S256 d128 causal float16: 4 points   2 simulated, 2 do not fit" in result.stdout
    assert "best" in result.stdout
    assert "first at block_kv=256 block_q=2048" in result.stdout
    match = re.search(r"wrote (runs/explore-flash-pangu_38b-256-ascend_910b2-[0-9a-f]{6}\.csv)", result.stderr)
    assert match
    assert len((elsewhere / match[1]).read_text().splitlines()) == 5
    document = _document(*arguments, "--json", "-o", "b.csv")
    assert document["complete"] is True
    assert document["best"]["tiling"]["block_q"] == 128
    assert [point["status"] for point in document["points"]] == ["ok", "infeasible"] * 2
    twin = _npusim("explore", "flash", "-f", "block_kv=256,512", "--seq", "256", "-j1", "--exhaustive")
    assert re.search(r"wrote runs/explore-flash-pangu_38b-256-ascend_910b2-[0-9a-f]{6}-exhaustive\.csv", twin.stderr)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "name a field to explore: block_q"),
        (("-f", "blok=1"), "blok: unknown tiling field"),
        (("-f", "block_kv=1:2"), "not a range"),
        (("-f", "block_q=2048", "-j1"), "no point fits"),
    ],
)
def test_explore_says_what_is_wrong(arguments: tuple[str, ...], message: str) -> None:
    result = _npusim("explore", "flash", "--seq", "256", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def _rows(store: Path) -> int:
    """Return the rows of a store that is being written."""
    try:
        return len(read_store(store)[1])
    except (SpecError, sqlite3.Error):
        return 0


@pytest.mark.usefixtures("terminals_sigint")
def test_interrupted_exploration_keeps_what_it_has(elsewhere: Path) -> None:
    file = elsewhere / "sweep.csv"
    # Ten thousand points, each simulated: many minutes.
    space = ("-f", "depth=0:14:1", "-f", "block_q=16:512:16", "-f", "block_kv=16:512:16", "--exhaustive")
    process = subprocess.Popen(
        [*COMMAND, "explore", "flash", *space, "--seq", "256", "--tp", "8", "-j1", "--json", "-o", str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + HUNG_S
    store = file.with_suffix(".sqlite")
    while not _rows(store):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=HUNG_S)
    assert process.returncode == 130
    assert "npusim: interrupted" in stderr
    assert "Traceback" not in stderr
    document = json.loads(stdout)
    assert document["complete"] is False
    assert len(document["points"]) == len(file.read_text().splitlines()) - 1
    assert f"wrote {file}" in stderr


def test_an_exploration_interrupted_before_its_first_point_names_no_file(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("explore", "flash", "-f", "block_kv=128,256", "--seq", "256", "-j1", "-o")
    _ok(*arguments, "old.csv")
    before = (elsewhere / "old.csv").read_bytes()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(search_module, "evaluate", interrupted)
    for name in ("old.csv", "new.csv"):
        result = _npusim(*arguments, name)
        assert result.exit_code == 130
        assert result.stderr == "npusim: interrupted\n"
    assert (elsewhere / "old.csv").read_bytes() == before
    assert not (elsewhere / "new.csv").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "-o: the value is empty"),
        ("folder", "folder: is a folder"),
        ("folder.csv", "folder.csv: is a folder"),
        ("pipe", "pipe: is no regular file"),
        ("pipe.csv", "pipe.csv: is no regular file"),
        ("loop/x", "loop/x: cannot be written: loop is not a folder"),
    ],
)
def test_what_explore_cannot_write_to_is_said_first(name: str, message: str, elsewhere: Path) -> None:
    for folder in ("folder", "folder.csv"):
        (elsewhere / folder).mkdir()
    for pipe in ("pipe", "pipe.csv"):
        os.mkfifo(elsewhere / pipe)
    (elsewhere / "loop").symlink_to("loop")
    assert message in _error("explore", "flash", "-f", "block_kv=128", "--seq", "256", "-j1", "-o", name)


@pytest.mark.usefixtures("terminals_sigint")
def test_ctrl_c_while_the_command_line_is_loaded_is_no_traceback() -> None:
    code = (
        "import os, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'npusim.cli.app':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "from npusim.cli import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code, "hw", "list"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "npusim: interrupted\n")


def test_check_fails_with_1_until_accepted(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (elsewhere / "b").mkdir()
    case = "schema: npusim.baseline/1\nschedule: flash\nhw: ascend_910b2\nworkload: pangu_38b\nseq: 256\n"
    (elsewhere / "b" / "small.yaml").write_text(case)
    result = _npusim("check", "b")
    assert result.exit_code == 1
    assert "1 of 1 baselines not met; accept with: npusim check b --update" in result.stderr
    monkeypatch.setenv("CI", "1")
    assert "--update is refused" in _error("check", "b", "--update")
    monkeypatch.delenv("CI")
    assert "updated" in _ok("check", "b", "--update")
    text = (elsewhere / "b" / "small.yaml").read_text()
    (elsewhere / "b" / "small.yaml").write_text(re.sub(r"aic\.CUBE: \d+", "aic.CUBE: 1", text))
    assert "edited by hand after they were accepted" in _error("check", "b")
    (elsewhere / "b" / "small.yaml").write_text(text)
    usual = EnginePricing.of_op

    def slower(self: EnginePricing, op: Any) -> Any:
        cost = usual(self, op)
        return cost._replace(occupancy_cycles=cost.occupancy_cycles * 2) if op.label == "update" else cost

    monkeypatch.setattr(EnginePricing, "of_op", slower)
    result = _npusim("check", "b")
    assert result.exit_code == 1
    assert re.search(r"small\s+[\d,]+\s+[\d,]+\s+\+\d.\d\d %\s+changed\s+steady", result.stdout)
    assert re.search(r"us longer \(.*\): aiv0.VECTOR: update \+", result.stdout)
    assert re.search(r"moved, in cycles: .*aiv0.VECTOR update \+", result.stdout)
    assert "changed" in _npusim("check", "b", "--update").stdout
    assert _npusim("check", "b", "--tolerance", "99%").exit_code == 0
    result = _npusim("check", "b", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["passed"] is False
    assert "updated" in _ok("check", "b", "--update", "--reason", "updates twice as long")
    assert "reason: updates twice as long" in (elsewhere / "b" / "small.yaml").read_text()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("schedule: flash", "b.yaml:1  schema: missing; write schema: npusim.baseline/1"),
        (
            "schema: npusim.baseline/1\nschedule: flash\nworkload: pangu_38b",
            "hw: missing; a device by name, or a path relative to this file",
        ),
        (
            "schema: npusim.baseline/1\nschedule: flash\nhw: h200\nworkload: pangu_38b\n"
            "expect: {device_digest: x, busy_cycles: {}}",
            "b.yaml:5  expect.cycles: missing",
        ),
    ],
)
def test_hints_of_check_speak_of_baselines(body: str, message: str, elsewhere: Path) -> None:
    (elsewhere / "b.yaml").write_text(body)
    error = _error("check", "b.yaml")
    assert message in error
    assert "basis" not in error


def test_an_override_of_a_baseline_is_called_so(elsewhere: Path) -> None:
    (elsewhere / "b.yaml").write_text(
        "schema: npusim.baseline/1\nschedule: flash\nhw: ascend_910b2\nworkload: pangu_38b\nseq: 256\n"
        "overrides: {clock: 3}\n"
    )
    result = _npusim("check", "b.yaml")
    assert result.exit_code == 1
    assert "overrides: clock=3: there is no key 'clock'. Did you mean `clock_hz`?" in result.stdout


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (OSError(28, "No space left on device"), "npusim: error: No space left on device\n"),
        (FileNotFoundError(2, "No such file", "gone"), "npusim: error: No such file (gone)\n"),
        (MemoryError(), "npusim: error: not enough memory; use fewer --rows"),
    ],
)
def test_what_the_machine_refuses_is_an_error_too(
    fault: BaseException, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise fault

    monkeypatch.setattr(importlib.import_module("npusim.simulation.simulate"), "run_plan", refuse)
    result = _npusim("run", "flash", "--no-save")
    assert result.exit_code == 2
    assert result.stderr.startswith(message)


# ---------------------------------------------------------------- hw, workload


def test_an_unknown_name_lists_devices_and_nodes() -> None:
    for verb in (("hw", "show"), ("hw", "validate"), ("run", "flash", "--no-save", "--hw")):
        result = _npusim(*verb, "tpu")
        assert result.exit_code == 2
        assert [n for n in (*list_devices(), *list_nodes()) if n not in result.stdout + result.stderr] == []
    assert "Did you mean `ascend_910b2_x8`?" in _error("hw", "show", "ascend_910b2_x")


def test_devices_are_listed_shown_and_validated(elsewhere: Path) -> None:
    text = _ok("hw", "list")
    known = [*list_devices(), *list_nodes()]
    assert all(name in text for name in known)
    assert [d["name"] for d in _document("hw", "list", "--json")["devices"]] == known
    text = _ok("hw", "show", "ascend_910b2", "--only", "links.hbm")
    assert re.search(r"^  links\.hbm\.bytes_per_s +1\.45 TB/s  measured$", text, re.MULTILINE)
    assert re.search(
        r"^    l2\.bytes_per_s +7 TB/s  vendor$", _ok("hw", "show", "ascend_910b2", "--only", "links"), re.MULTILINE
    )
    assert "clock_hz" not in text
    (source,) = {fact.source for key, fact in load_device("ascend_910b2").facts() if key == "links.hbm.bytes_per_s"}
    assert source not in text
    assert source in _ok("hw", "show", "ascend_910b2", "--only", "links.hbm", "--sources")
    shown = _document("hw", "show", "ascend_910b2", "--json", "-C", "group_count=3")
    assert shown["device"]["group_count"]["value"] == 3
    assert json.loads(_ok("hw", "schema"))["title"] == "DeviceSpec"
    (elsewhere / "good.yaml").write_text("schema: npusim.device/1\nextends: ascend_910b2\nname: mine\n")
    assert "ok: mine" in _ok("hw", "validate", "good.yaml")


def test_faulty_device_file_exits_with_2_and_names_the_line(elsewhere: Path) -> None:
    (elsewhere / "good.yaml").write_text("schema: npusim.device/1\nextends: ascend_910b2\nname: mine\n")
    (elsewhere / "nameless.yaml").write_text("schema: npusim.device/1\nextends: ascend_910b2\n")
    assert "nameless.yaml:1  name: missing; a file that ext" in _npusim("hw", "validate", "nameless.yaml").stdout
    named = 'cores.aic.engines.CUBE.arithmetic.float16: {value: tree, basis: assumed, source: "s"}\n'
    (elsewhere / "tree.yaml").write_text("schema: npusim.device/1\nextends: ascend_910b2\nname: mine\n" + named)
    assert "unknown arithmetic 'tree'; known names:" in _npusim("hw", "validate", "tree.yaml").stdout
    (elsewhere / "bad.yaml").write_text("schema: npusim.device/1\nextends: ascend_910b2\nclok_hz: 1\n")
    result = _npusim("hw", "validate", "good.yaml", "bad.yaml")
    assert result.exit_code == 2
    assert "bad.yaml:3  clok_hz: unknown key. Did you mean `clock_hz`?" in result.stdout
    assert "faulty files: 1 of 2" in result.stderr
    result = _npusim("hw", "validate", "bad.yaml", "--json")
    assert result.exit_code == 2
    assert json.loads(result.stdout)["files"][0]["valid"] is False


def test_unknown_basis_and_key_of_a_device_are_refused() -> None:
    assert "vendor" in _error("hw", "show", "ascend_910b2", "--basis", "guessed")
    assert "no number whose key starts with 'nothing'" in _error("hw", "show", "ascend_910b2", "--only", "nothing")


def test_workloads_are_listed_shown_and_imported(elsewhere: Path) -> None:
    text = _ok("workload", "list")
    assert all(name in text for name in list_workloads())
    assert "one device       B1 N5 S4096 d128 causal float16" in _ok("workload", "show", "pangu_38b")
    assert _document("workload", "show", "pangu_38b", "--json")["problem"]["heads"] == 5
    config = {"hidden_size": 512, "num_attention_heads": 4, "num_hidden_layers": 2, "model_type": "llama"}
    (elsewhere / "config.json").write_text(json.dumps(config))
    assert _ok("workload", "import", "config.json").startswith("schema: npusim.workload/1\n")
    result = _npusim("workload", "import", "config.json", "--tp", "2", "-o", "mine.yaml")
    assert result.exit_code == 0
    assert "npusim run flash -w mine.yaml" in result.stderr
    document = _document("run", "flash", *QUICK, "-w", "mine.yaml", "--no-save", "--json")
    assert document["problem"]["heads"] == 2
    assert "possible: 1 2 4" in _error("workload", "import", "config.json", "--tp", "3")
    assert "workload files end in .yaml" in _error("workload", "import", "config.json", "-o", "a.txt")


# ---------------------------------------------------------------- terminal


def _on_terminal(*arguments: str, env: dict[str, str]) -> str:
    leader, follower = pty.openpty()
    with subprocess.Popen(
        [*COMMAND, *arguments], stdout=follower, stderr=subprocess.DEVNULL, env={**os.environ, **env}
    ) as process:
        os.close(follower)
        parts = []
        while True:
            try:
                part = os.read(leader, 65536)
            except OSError:  # the other end is closed
                break
            if not part:
                break
            parts.append(part)
    os.close(leader)
    assert process.returncode == 0
    return b"".join(parts).decode().replace("\r\n", "\n")


def test_colour_is_for_terminals_and_not_with_no_color() -> None:
    env = {"TERM": "xterm-256color", "COLUMNS": "200"}
    os.environ.pop("NO_COLOR", None)
    coloured = _on_terminal("hw", "list", env=env)
    plain = _on_terminal("hw", "list", env={**env, "NO_COLOR": "1"})
    assert "\x1b[" in coloured
    assert "\x1b" not in plain
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured).replace(" \n", "\n").split() == plain.split()
    assert plain == _ok("hw", "list")
