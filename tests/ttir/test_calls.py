"""Recorded calls: what is recorded, their file, the verbs that take them, and what is refused."""

from __future__ import annotations

import json
import re
import shlex
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import npusim
from npusim.cli.app import app
from npusim.errors import NpusimError, SpecError
from npusim.kernels.triton.calls import Calls, read_calls
from npusim.kernels.triton.compiler import compiled_text
from npusim.simulation.request import Request

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: npusim[triton]")
SCRIPT = """
import sys
import numpy as np
from ttir import recorded_kernels as kernels

def main(seq=1000):
    x = np.zeros(seq, np.float32)
    kernels.add[lambda a: (-(-seq // a["B"]),)](x, x, np.zeros_like(x), seq)

if __name__ == "__main__":
    main(int(sys.argv[1]))
"""
KERNEL = """
import triton
import triton.language as tl

@triton.jit
def kernel(X, Y, T, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    x = tl.load(X + i)
    {}
"""
#: What is refused, by the line that has it: words of the message.
REFUSED = {
    "tl.store(Y + tl.load(T + i) // 2, x)": "a store writes the same row at two indices",
    "tl.atomic_max(Y + i, x)": "only supported atomic",
    "tl.store(Y + i + x.to(tl.int32), x)": "an address that the kernel computes from values is not supported",
    "tl.store(Y + i // 2, x)": "several elements of a block to one element of the tensor",
    "tl.store(Y + i + 1, x)": "no mask prevents it",
    "tl.store(Y + i * 0 + tl.program_id(0), x, mask=i < 0)": "elements|never|stores|once",
    "tl.store(Y + i, tl.randn(n, i))": "",
}


def test_arguments_are_views_with_integers_and_strides() -> None:
    from ttir.drawn import drawn, launched

    case = drawn(2)
    with npusim.record() as calls:
        launched(case, lambda x: x)
    (call,) = calls
    q, starts = (call.arguments[n] for n in ("Q", "starts"))
    assert q.shape == case.arguments["Q"].shape
    assert [s * 2 for s in q.strides] == list(case.arguments["Q"].strides)
    assert q.data is None, "floats are recorded where that is asked for"
    assert np.array_equal(starts.data, case.arguments["starts"])
    assert call.path.endswith("recorded_kernels.py")
    assert "drawn.py:" in call.where
    assert call.grid == case.grid


def test_a_tuner_is_one_call_with_all_configurations() -> None:
    from ttir.drawn import launched
    from ttir.tutorials import TUTORIALS

    with npusim.record() as calls:
        launched(TUTORIALS["01"](), lambda x: x)
    (call,) = calls
    assert [(c.grid, c.constants["B"]) for c in call.configurations] == [((16,), 64), ((8,), 128)]
    times = [npusim.run(call, hw="h200", tiling={"config": i}, numerics=False) for i in (0, 1)]
    assert [t.tiling.warps for t in times] == [4, 8]
    search = npusim.explore(call, hw="h200")
    assert len(search.outcomes) == 2
    with pytest.raises(NpusimError, match="config: 2; add has configurations 0 to 1"):
        npusim.run(call, tiling={"config": 2})


def test_what_is_replaced_while_recording_is_restored() -> None:
    from triton.runtime import driver
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    before = JITFunction.run, Autotuner.run, driver._active
    with pytest.raises(KeyError), npusim.record():
        raise KeyError
    assert before == (JITFunction.run, Autotuner.run, driver._active)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = CliRunner().invoke(app, ["record", str(tmp_path / "script.py"), "-o", str(tmp_path / "c.npz"), "--", "500"])
    assert done.exit_code == 0, done.stderr
    return tmp_path / "c.npz"


def test_a_file_is_taken_by_the_verbs(file: Path) -> None:
    again = CliRunner().invoke(app, ["record", str(file), "--json"])
    (row,) = json.loads(again.stdout)["calls"]
    assert (row["kernel"], row["grid"], row["configurations"], row["unread"]) == ("add", "8", 2, "")
    name = f"{file}::0"
    for words in (["run", name, "--no-save"], ["program", name], ["compare", name, f"{name} -t config=1", "--no-save"]):
        done = CliRunner().invoke(app, [w for w in words if w != "--no-save"])
        assert done.exit_code == 0, (words, done.stderr)
    assert npusim.run(str(file)).schedule == str(file), "the only call of a file needs no number"


def test_a_call_prints_the_shapes_of_its_tensors(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(file.parent)
    run = CliRunner().invoke(app, ["run", f"{file}::0", "--no-numerics"])
    assert re.search(r"problem +\w+, \w+, \w+ \(500\) float32\n", run.stdout)
    search = CliRunner().invoke(app, ["explore", f"{file}::0", "-f", "config=0,1", "-j1"])
    assert re.search(r" on ascend_910b2, \w+, \w+, \w+ \(500\) float32: 2 points", search.stdout)
    (tensors,) = (json.loads(f.read_text())["problem"]["tensors"] for f in Path("runs").glob("*/result.json"))
    assert list(tensors.values()) == [[500, "float32"]] * 3


def test_an_autotuners_configurations_are_ranked(file: Path) -> None:
    done = CliRunner().invoke(app, ["tune", f"{file}::0", "--hw", "h200", "-j1", "--json"])
    assert done.exit_code == 0, done.stderr
    ranking = json.loads(done.stdout)["shapes"][0]["ranking"]
    runs = [npusim.run(f"{file}::0", hw="h200", tiling={"config": i}, l2="steady", numerics=False) for i in (0, 1)]
    predicted = {int(re.findall(r"\bB=(\d+)", row["configuration"])[0]): row["us"] for row in ranking}
    assert set(predicted) == {64, 128}
    assert list(predicted.values()) == sorted(predicted.values())
    assert [r.tiling.warps for r in runs] == [4, 8]
    differences = {runs[i].latency_us - predicted[b] for i, b in enumerate((64, 128))}
    assert max(differences) - min(differences) < 1e-6, "the same times, a launch apart"


def test_a_run_says_its_configuration_and_takes_the_best_of_tune(file: Path) -> None:
    name = f"{file}::0"
    for asked, number in ((None, 0), ({"config": 1}, 1), ({"config": "1"}, 1)):
        result = npusim.run(name, hw="h200", tiling=asked, numerics=False)
        (said,) = (n for n in result.notes if n.startswith("configuration "))
        blocks = ("B=64 num_warps=4", "B=128 num_warps=8")[number]
        assert said.startswith(f"configuration {number + 1} of 2 (config={number}: {blocks}"), said
    done = CliRunner().invoke(app, ["tune", name, "--hw", "h200", "-j1", "--json"])
    (shape,) = json.loads(done.stdout)["shapes"]
    first = int(re.findall(r"config=(\d+)", shape["ranking"][0]["configuration"])[0])
    for hw in ("h200", "ascend_910b2"):
        best = npusim.run(name, hw=hw, tiling={"config": "best"}, numerics=False)
        assert best.tiling.config in (0, 1)
        assert any(n.startswith(f"configuration {best.tiling.config + 1} of 2") for n in best.notes)
        if hw == "h200":
            assert (best.tiling.config, best.tiling.warps) == (first, (4, 8)[first])
    words = shlex.split(shape["best"]["run"])
    assert words[1:] == ["run", name, "--hw", "h200", "-t", f"config={first}", "--l2", "steady"]
    assert (
        shape["best"]["decorator"]
        == f"triton.Config({{'B': {(64, 128)[first]}}}, num_warps={(4, 8)[first]}, num_stages=3)"
    )
    assert shape["best"]["errors"].startswith("from 224 measured times of ")
    ran = CliRunner().invoke(app, [*words[1:], "--no-save", "--no-numerics", "--json"])
    assert ran.exit_code == 0, ran.output
    with pytest.raises(NpusimError, match=r"config=best: no value has a time: .*no timing model"):
        npusim.run(name, hw="xeon_avx512", tiling={"config": "best"})


def test_fields_have_the_names_that_users_of_triton_write(file: Path) -> None:
    name = f"{file}::0"
    runs = [npusim.run(name, hw="h200", tiling={n: 2, "config": 1}, numerics=False) for n in ("warps", "num_warps")]
    assert [r.tiling.warps for r in runs] == [2, 2]
    assert runs[0].cycles == runs[1].cycles
    with pytest.raises(NpusimError, match="warps: set to 2, and under its other name num_warps to 4; set it once"):
        npusim.run(name, hw="h200", tiling={"warps": 2, "num_warps": 4})
    found = npusim.explore(name, {"num_warps": (1, 2)}, hw="h200")
    assert [o.point for o in found.outcomes] == [{"warps": 1}, {"warps": 2}]


def test_a_function_is_called_with_each_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("script.py").write_text(SCRIPT)
    assert CliRunner().invoke(app, ["record", "script.py::main", "--seq", "512,1k"]).exit_code == 0
    assert [call.grid for call in read_calls(Path("calls.npz"))] == [(8,), (16,)]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["record", "no.py"], "no.py: no such file"),
        (["record", "script.py", "--seq", "4"], "needs a function that is called with each size"),
        (["record", "script.py::no"], "no function 'no'; its functions are main"),
        (["record", "script.py"], r"script.py:\d+: IndexError"),
        (["record", "empty.py"], "the program launched no kernel of Triton or TileLang"),
        (["run", "no.npz::0"], "no.npz: no such file"),
        (["run", "bad.npz::0"], "bad.npz: this is not a file of recorded calls"),
    ],
)
def test_wrong_programs_and_files_are_said(
    words: list[str], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("script.py").write_text(SCRIPT)
    Path("empty.py").write_text("")
    Path("bad.npz").write_bytes(b"PK nothing")
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2
    assert re.search(why, " ".join(done.stderr.split())), done.stderr


def test_sizes_and_numbers_of_a_call_are_its_own(file: Path) -> None:
    with pytest.raises(SpecError, match="the sizes of a recorded call are fixed"):
        npusim.run(f"{file}::0", problem={"n": 4})
    with pytest.raises(SpecError, match=r"no call '1'; its calls are .*c\.npz::0 add"):
        npusim.run(f"{file}::1")


def test_a_recording_says_which_kernels_are_read_and_why_others_are_not(tmp_path: Path) -> None:
    kernel = KERNEL.format("tl.atomic_max(Y + i, x)").replace("def kernel", "def summed")
    (tmp_path / "kernels.py").write_text(f"{KERNEL.format('tl.store(Y + i, x)')}\n\n{kernel}")
    called = "(x, x.copy(), np.arange(256, dtype=np.int32), 256, B=128)"
    lines = ["import numpy as np", "from kernels import kernel, summed", "x = np.zeros(256, np.float32)"]
    script = "\n".join([*lines, *[f"kernel[(2,)]{called}"] * 2, f"summed[(2,)]{called}"])
    (tmp_path / "script.py").write_text(script)
    done = CliRunner().invoke(app, ["record", str(tmp_path / "script.py"), "-o", str(tmp_path / "c.npz")])
    said = " ".join(done.stdout.split())
    assert "2 of 3 launches as kernels of tiles" in said
    assert re.search(r"kernel 2 read .*summed 1 .*kernels\.py:\d+: the only supported atomic", said), said


@pytest.mark.parametrize("change", ["format", "grid", "shape", "calls"])
def test_a_damaged_file_is_refused(change: str, file: Path) -> None:
    arrays: dict[str, Any] = dict(np.load(file))
    document = json.loads(bytes(arrays["calls"]).decode())
    call = document["calls"][0]
    if change == "format":
        document["format"] = 99
    elif change == "grid":
        call["configurations"][0]["grid"] = [1, 2, 3, 4]
    elif change == "shape":
        call["arguments"]["X"]["shape"] = [-4]
    else:
        document["calls"] = [3]
    arrays["calls"] = np.frombuffer(json.dumps(document).encode(), np.uint8)
    np.savez(file, **arrays)
    with pytest.raises(SpecError, match="recorded calls"):
        read_calls(file)


def test_nothing_recorded_and_other_suffixes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="the file has no recorded launch"):
        Calls().save(tmp_path / "c.npz")
    with pytest.raises(SpecError, match=r"end with \.npz"):
        Calls().save(tmp_path / "c.bin")


@pytest.mark.parametrize("line", REFUSED)
def test_what_is_not_read_is_refused_at_its_line(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import runpy

    path = tmp_path / "kernel.py"
    path.write_text(KERNEL.format(line))
    kernel = runpy.run_path(str(path))["kernel"]
    x = np.zeros(256, np.float32)
    with npusim.record() as calls:
        kernel[(2,)](x, x.copy(), np.random.default_rng(0).permutation(256).astype(np.int32), 256, B=128)
    with pytest.raises(NpusimError, match=rf"kernel\.py:\d+: .*({REFUSED[line]})"):
        npusim.run(calls[0], numerics=False)


def test_a_files_only_call_runs_without_its_number_with_floats_too(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    words = ["record", str(tmp_path / "script.py"), "-o", str(tmp_path / "c.npz"), "--floats", "--", "500"]
    assert CliRunner().invoke(app, words).exit_code == 0
    done = [CliRunner().invoke(app, ["run", f"{tmp_path}/c.npz{n}", "--json"]) for n in ("", "::0")]
    assert [x.exit_code for x in done] == [0, 0], done[0].stderr
    errors = [json.loads(x.stdout)["numerics"] for x in done]
    assert errors[0] == errors[1]


def test_options_are_those_that_triton_compiles(tmp_path: Path) -> None:
    import runpy

    path = tmp_path / "kernel.py"
    path.write_text(KERNEL.format("tl.store(Y + i, x)"))
    kernel = runpy.run_path(str(path))["kernel"]
    x = np.zeros(256, np.float32)
    options: list[dict[str, int]] = [{"num_stages": 0}, {"maxnreg": 256}, {"num_warps": 3}]
    with npusim.record() as calls:
        for each in options:
            kernel[(2,)](x, x.copy(), np.arange(256, dtype=np.int32), 256, B=128, **each)
    none, most, refused = (call.configurations[0] for call in read_calls(calls.save(tmp_path / "c.npz")))
    assert none.options["num_stages"] == 1
    assert "num_stages=0 is read as num_stages=1" in none.notes[0]
    assert most.options["maxnreg"] == 256
    assert not most.refused
    assert refused.refused == "kernel: num_warps=3; allowed: 1, 2, 4, 8, 16, 32"


def test_what_a_launch_is_is_said_in_one_place() -> None:
    """The sign between a file and a launch is in no other file of the package."""
    package = Path(npusim.__file__).parent
    with_sign = [f.relative_to(package).as_posix() for f in package.rglob("*.py") if '"::"' in f.read_text()]
    assert with_sign == ["kernels/triton/__init__.py"]
    names = {"calls.npz": True, "calls.npz::0": True, "k.py::f[1](q)": True, "mine.py:FLASH": False, "flash": False}
    assert {n: Request(n).is_launch for n in names} == names


NESTED = "module {{\n  tt.func public @add(%X: !tt.ptr<f32>) attributes {{noinline = false}} {{\n{}\n  }}\n}}\n"
#: What a hostile file has in place of what was recorded, by a path of keys; and words of the message.
HOSTILE: dict[str, tuple[Any, Any, str]] = {
    "an empty text": (("ttir", 0), "", "the TTIR has no kernel"),
    "text that is no TTIR": (("ttir", 0), "(" * 10**5, "the TTIR has no kernel"),
    "no text": (("ttir",), [5], r"ttir: a list of texts is needed, got \[5\]"),
    "regions in regions": (
        ("ttir", 0),
        NESTED.format("scf.if %c {\n" * 10**5 + "}\n" * 10**5),
        "nested more than 64 deep",
    ),
    "types in types": (
        ("ttir", 0),
        NESTED.format("%0 = tt.splat %X : " + "tensor<" * 10**5 + ">" * 10**5),
        "nested more than 64 deep",
    ),
    "an end that is missing": (
        ("ttir", 0),
        NESTED.format("").rpartition("  }")[0],
        "the text of its TTIR is truncated",
    ),
    "an operation that is none": (("ttir", 0), NESTED.format("    %0 = !!"), "line 3 of its TTIR is not an operation"),
    "no calls": (("calls",), {}, r"calls: a list of calls is needed, got \{\}"),
    "none of any": (("calls",), [], r"calls: a list of calls is needed, got \[\]"),
    "many stages": (("calls", 0, "configurations", 0, "options", "num_stages"), 10**6, "num_stages=1000000; allowed"),
    "an offset": (("calls", 0, "arguments", "X", "offset"), 2**70, r"X: \d+; allowed: whole numbers from 0, below"),
    "a stride": (("calls", 0, "arguments", "X", "strides"), [2**62], "its last element: "),
    "a constant": (
        ("calls", 0, "configurations", 0, "constants", "Q"),
        5,
        "constant 'Q': the kernel has no numeric parameter",
    ),
    "a constant for a tensor": (
        ("calls", 0, "configurations", 0, "constants", "X"),
        5,
        "constant 'X': the kernel has no numeric",
    ),
    "another format": (
        ("calls", 0, "arguments", "X", "fmt"),
        "float16",
        r"X: the TTIR has !tt\.ptr<f32>, but the recorded",
    ),
    "a number for a tensor": (
        ("calls", 0, "arguments", "X"),
        3,
        r"X: the TTIR has !tt\.ptr<f32>, but the recorded argument is [^']* ",
    ),
    "a tensor for a number": (
        ("calls", 0, "arguments", "n"),
        "x",
        r"n: the TTIR has i32, but the recorded argument is 'x'",
    ),
    "another parameter": (("calls", 0, "arguments"), {"n": 3, "B": 64}, "X: a parameter of the TTIR has no recorded"),
    "a number beyond its type": (("calls", 0, "arguments", "n"), 2**40, "n: 1099511627776; allowed: an integer of 32"),
    "a grid": (("calls", 0, "configurations", 0, "grid"), [2**20, 2**20], "a grid of .* 1,048,576 programs"),
    "letters": (("calls", 0, "path"), "x" * 10**6, r"path: .*\(1,000,002 letters\); allowed: text of at most 4,096"),
    "no object for a call": (("calls", 0), 5, "call 0: 5; allowed: an object with names"),
    "a list of arguments": (("calls", 0, "arguments"), [1], r"arguments: \[1\]; allowed: an object with names"),
    "no list of strides": (("calls", 0, "arguments", "X", "strides"), 1, "strides: 1; allowed: a list"),
    "a list for a stride": (("calls", 0, "arguments", "X", "strides"), [[]], r"X: \[\]; allowed: whole numbers"),
    "too many strides": (("calls", 0, "arguments", "X", "strides"), [1, 1], "X: 2 strides; allowed: one for each of"),
    "a stride to before": (("calls", 0, "arguments", "X", "strides"), [-1], "X: its first element: -"),
    "a truth for a number": (("calls", 0, "configurations", 0, "grid"), [True], "grid: True; allowed: whole numbers"),
    "another text": (("calls", 0, "configurations", 0, "ttir"), 7, "ttir: 7; allowed: 0 to 1, an index into"),
    "no options": (("calls", 0, "configurations", 0, "options"), [1], r"options: \[1\]; allowed: an object"),
    "a folder": (("calls", 0, "name"), "../../x", r"a kernel called '\.\./\.\./x'"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_file_that_is_anyones_is_an_error_or_read(what: str, file: Path) -> None:
    path, value, why = HOSTILE[what]
    arrays: dict[str, Any] = dict(np.load(file))
    document = json.loads(bytes(arrays["calls"]).decode())
    place = document
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    arrays["calls"] = np.frombuffer(json.dumps(document).encode(), np.uint8)
    np.savez(file, **arrays)
    tunes = [["tune", f"{file}::0", "--hw", "h200", "-j1"]] if path != ("ttir", 0) else []  # the other one is ranked
    for words in (["run", f"{file}::0", "--hw", "h200", "--no-save"], *tunes):
        done = CliRunner().invoke(app, words)
        said = " ".join(done.stderr.split())
        assert done.exit_code == 2, (words, done.exception)
        assert re.search(why, said), said
        assert len(said) < 1000


def test_a_compiler_that_ends_its_process_is_said() -> None:
    with pytest.raises(
        SpecError, match=r"TTIR: Triton('s compiler stops at this TTIR with SIG| cannot compile for sm_90)"
    ):
        compiled_text("", "sm_90", {"num_warps": 4})
    loops = NESTED.format("loc(" * 10**5)
    with pytest.raises(
        SpecError, match=r"TTIR: Triton('s compiler stops at this TTIR with SIG| cannot compile for sm_90)"
    ):
        compiled_text(loops, "sm_90", {"num_warps": 4})
