"""Start-up, compilation notice and disk cache."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import npusim.formats
from npusim import cache
from tests.parsed import nodes_of_kind, tree_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Copied = Callable[..., tuple[str, str]]

PACKAGE = Path(npusim.formats.__file__).parent
ROOT = PACKAGE.parent.parent
CAST = "import numpy as np, npusim.formats as f; print(f.cast(np.float32([1.5]), 'float16')[0])"


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=variables, check=True, timeout=900
    )


#: Runs each code that stdin gives in a copy of this process, in which numba has compiled something and npusim nothing.
COPYING = """
import gc, json, os, signal, sys, numba, npusim.formats
gc.disable()
numba.njit("void(int64[::1])", nogil=True)(lambda x: None)
for line in sys.stdin:
    code, environment = json.loads(line)
    if not os.fork():
        signal.alarm(900)  # a code that hangs ends
        for stream, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(name, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), stream)
        os.environ.update(environment)
        exec(code, {})
        sys.stdout.flush()
        os._exit(0)
    print(os.wait()[1], flush=True)
"""


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Copied]:
    """Return a function that runs a code and returns what it says on stdout and stderr: numba starts once for all."""
    folder = tmp_path_factory.mktemp("copied")
    command, variables = [sys.executable, "-c", COPYING], {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=folder, env=variables, **pipes) as process:

        def answer(code: str, **environment: str) -> tuple[str, str]:
            assert process.stdin is not None and process.stdout is not None
            print(json.dumps([code, environment]), file=process.stdin, flush=True)
            status = process.stdout.readline().strip()
            said = (folder / "stdout").read_text(), (folder / "stderr").read_text()
            assert status == "0", said
            return said

        yield answer


def test_importing_formats_does_not_import_numba() -> None:
    code = "import sys, npusim.formats; print('numba' in sys.modules)"
    assert run(code).stdout.strip() == "False"


def test_first_use_says_that_it_compiles_and_the_cache_keeps_it_silent(tmp_path: Path) -> None:
    """Kept code is called without the translator; numba is not imported in either case."""
    seen = CAST + "; import sys; print('npusim.formats.kernel_code' in sys.modules, 'numba' in sys.modules)"
    first = run(seen, NPUSIM_CACHE=str(tmp_path))
    assert first.stdout.split() == ["1.5", "True", "False"]
    assert first.stderr.count("\n") == 1
    assert first.stderr.startswith("npusim: compiling numeric kernels")
    second = run(seen, NPUSIM_CACHE=str(tmp_path))
    assert (second.stdout.split(), second.stderr) == (["1.5", "False", "False"], "")


def test_unusable_cache_folder_still_works(tmp_path: Path, copied: Copied) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    stdout, stderr = copied(CAST, NPUSIM_CACHE=str(blocked / "cache"))
    assert stdout.strip() == "1.5"
    assert stderr.count("cannot be stored in") == 1


def test_a_kernel_refuses_what_its_code_could_not_read() -> None:
    from npusim.formats import cast_kernels

    out = np.zeros(2, np.int32)
    with pytest.raises(AssertionError, match="one after the other"):
        cast_kernels.widen_float16(np.zeros(4, np.int16)[::2], out)


PRODUCT = """
import numpy as np, npusim.formats as f
x = f.cast(np.sin(np.arange(48.0)).reshape(3, 16), "float16")
for name in {names}:
    print(f.matmul(x, x.T, arithmetic=name).tobytes().hex())
"""
ARITHMETICS = ("ascend.cube.k16.f16.f32", "hopper.wgmma.k16.f16.f32")
#: An llvmlite whose interface is another one, as a later version's may be.
OTHER_INTERFACE = "import llvmlite.binding as b; del b.Target.from_default_triple\n"


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_numba_compiles_kernels_to_the_same_bits(tmp_path: Path, copied: Copied, count: int) -> None:
    """On request, and if llvmlite's interface is not the known one, which is said."""
    code = PRODUCT.format(names=ARITHMETICS[:count])
    usual = run(code)
    plain = copied(code, NPUSIM_PLAIN_NUMBA="1", NPUSIM_CACHE=str(tmp_path))
    assert plain == (usual.stdout, "")
    assert not list(tmp_path.iterdir())
    stdout, stderr = copied(OTHER_INTERFACE + CAST, NPUSIM_CACHE=str(tmp_path))
    assert stdout.strip() == "1.5"
    assert "has an unknown interface (type object 'Target' has no attribute 'from_default_triple')" in stderr


@pytest.mark.exhaustive
def test_numba_compiles_the_engine_to_the_same_cycles() -> None:
    """Its arrays are then tuples of arrays, compiled for half a minute."""
    code = """
import npusim
for hw in ("ascend_910b2", "h200"):
    print([npusim.run("flash", seq=256, hw=hw, numerics=False, method=m).cycles for m in ("block", "steady")])
"""
    assert run(code, NPUSIM_PLAIN_NUMBA="1").stdout == run(code).stdout


FAULTS: tuple[Callable[[bytes], bytes], ...] = (
    lambda content: b"",
    lambda content: content[:-9],
    lambda content: content[: len(content) // 2] + bytes(64) + content[len(content) // 2 + 64 :],
)


def test_damaged_machine_code_is_never_run_but_compiled_anew(tmp_path: Path, copied: Copied) -> None:
    """Each file in each way: the value is right, the file is named, and the next run is silent again."""
    copied(CAST, NPUSIM_CACHE=str(tmp_path))
    (file,) = tmp_path.glob("*.code")
    for damaged in FAULTS:
        file.write_bytes(damaged(file.read_bytes()))
        stdout, stderr = copied(CAST, NPUSIM_CACHE=str(tmp_path))
        assert stdout.strip() == "1.5"
        assert stderr.splitlines()[0] == f"npusim: {file} is damaged: npusim rebuilds it"
        stdout, stderr = copied(CAST, NPUSIM_CACHE=str(tmp_path))
        assert (stdout.strip(), stderr) == ("1.5", "")


def test_an_entry_is_only_taken_with_the_stamp_it_was_kept_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path))
    these, others = cache.digest("these sources"), cache.digest("other sources")
    cache.store("f.code", these, b"1")
    kept = [cache.load(*of) for of in (("f.code", these), ("f.code", others), ("g.code", these))]
    assert kept == [b"1", None, None]
    assert (cache.is_kept("f.", these), cache.is_kept("f.", others), cache.is_kept("g.", these)) == (True, False, False)
    cache.store("f.code", others, b"2")
    assert (cache.load("f.code", these), cache.load("f.code", others)) == (None, b"2")


def test_a_full_disk_costs_the_cache_and_nothing_else(tmp_path: Path, copied: Copied) -> None:
    full = (
        "import npusim.cache as c\n"
        "c.tempfile.mkstemp = lambda prefix, dir: (c.os.open('/dev/full', c.os.O_WRONLY), f'{dir}/fresh')\n"
    )
    stdout, stderr = copied(full + CAST, NPUSIM_CACHE=str(tmp_path))
    assert stdout.strip() == "1.5"
    assert stderr.count(f"cannot be stored in {tmp_path}") == 1
    assert "No space left on device" in stderr


#: The package's and the user's folders, taken away.
NO_PLACE = "import npusim.cache as c; c._is_writable = lambda folder: False\n"


def test_without_a_writable_place_a_private_folder_serves_and_is_said_once(tmp_path: Path) -> None:
    elsewhere = "from pathlib import Path; c.__file__ = '/dev/null/npusim/cache.py'\n"
    where = {"NPUSIM_CACHE": "", "TMPDIR": str(tmp_path), "XDG_CACHE_HOME": "/dev/null"}
    first, second = (run(NO_PLACE + elsewhere + CAST, **where) for _ in range(2))
    (folder,) = tmp_path.iterdir()
    assert folder.name == f"npusim-cache-{os.geteuid()}"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert list(folder.glob("*.code")), "machine code is kept there"
    assert first.stderr.count(f"no cache folder can be written; compiled kernels are stored in {folder}") == 1
    assert "compiling numeric kernels" in first.stderr
    assert (second.stdout.strip(), second.stderr) == ("1.5", "")


@pytest.mark.parametrize("fault", ["open", "link", "file", "foreign", "none"])
def test_a_temporary_folder_that_others_can_write_is_not_used(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / f"npusim-cache-{os.geteuid()}"
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    cache.private_folder.cache_clear()
    if fault in ("open", "foreign"):
        folder.mkdir(mode=0o700)
    if fault == "open":
        folder.chmod(0o770)
    elif fault == "link":
        (tmp_path / "other").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "other")
    elif fault == "file":
        folder.write_text("")
    elif fault == "foreign":
        found = folder.lstat()
        stranger = os.stat_result((*found[:4], found.st_uid + 1, *found[5:]))
        monkeypatch.setattr(Path, "lstat", lambda self: stranger)
    else:
        monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "gone"))
    assert cache.private_folder() is None
    assert cache.private_folder() is None
    told = capfd.readouterr().err
    assert told.count("every process compiles") == 1
    cache.private_folder.cache_clear()
    monkeypatch.undo()


def test_a_private_folder_of_ones_own_is_taken_again_in_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    cache.private_folder.cache_clear()
    made = cache.private_folder()
    assert "are stored in" in capfd.readouterr().err
    cache.private_folder.cache_clear()
    assert cache.private_folder() == made
    assert capfd.readouterr().err == ""
    cache.private_folder.cache_clear()


def test_an_edited_source_file_makes_cached_code_stale() -> None:
    from npusim.formats import mma_exact
    from npusim.formats.jit import _machine, sources_stamp

    stamp, file = mma_exact.block_ranges._stamp(_machine()), PACKAGE / "mma_exact.py"  # type: ignore[attr-defined]
    assert stamp == cache.digest(sources_stamp(file), *_machine())
    assert {name for name, _ in sources_stamp(file)} == {
        "mma_exact.py",
        "reduction_kernels.py",
        "jit.py",
        "kernel_code.py",
        "kernel_expressions.py",
        "kernel_lines.py",
        "kernel_translator.py",
        "kernel_values.py",
        "kernel_parts.py",
    }
    timing = {name for name, _ in sources_stamp(PACKAGE.parent / "program" / "timing" / "periodic.py")}
    assert {"engine_kernel.py", "gpu_pipes.py", "jit.py", "kernel_translator.py"} <= timing
    assert not timing & {"mean_field.py", "des.py"}


#: What numpy, BLAS and libm compute in ways that change with the CPU, as functions and as methods.
FORBIDDEN = {
    "exp",
    "exp2",
    "expm1",
    "log",
    "log2",
    "log10",
    "log1p",
    "tanh",
    "sin",
    "cos",
    "power",
    "pow",
    "dot",
    "vdot",
    "einsum",
    "matmul",
    "inner",
    "tensordot",
    "sum",
    "nansum",
    "mean",
}
#: Everything that computes a bit of a result: formats, the executor, and sums of collectives.
BITS = [
    *sorted(PACKAGE.glob("*.py")),
    *(PACKAGE.parent / "program" / "numerics" / f"{name}.py" for name in ("executor", "semantics")),
    PACKAGE.parent / "machines" / "node" / "reduction.py",
]


@pytest.mark.parametrize("path", BITS, ids=lambda path: path.name)
def test_no_bits_depend_on_numpys_dispatch(path: Path) -> None:
    tree = tree_of(path)
    ours = ("formats", "context", "exact")  # npusim's own functions, and decimal's
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id in ours)
    }
    assert used & FORBIDDEN == set()
    assert not any(isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult) for node in ast.walk(tree))


def test_kernels_are_compiled_without_licence_to_reorder() -> None:
    """One place calls numba, never so as to reorder sums (`fastmath`, `parallel`), nor LLVM's text."""
    translator = "".join(path.read_text() for path in PACKAGE.glob("kernel_*.py"))
    assert not any(
        f" {flag} " in translator for flag in ("fast", "reassoc", "contract", "nnan", "ninf", "nsz", "arcp", "afn")
    )
    for path in PACKAGE.parent.rglob("*.py"):
        text = path.read_text()
        if not any(word in text for word in ("numba", "llvmlite", "fastmath", "parallel")):
            continue
        tree = tree_of(path)
        imports = {n.name for node in nodes_of_kind(tree, ast.Import) for n in node.names}
        imports |= {node.module for node in nodes_of_kind(tree, ast.ImportFrom) if node.module}
        of_numba = {name for name in imports if name.split(".")[0] in ("numba", "llvmlite")}
        assert not of_numba or path.name in ("jit.py", "kernel_code.py", "kernel_parts.py", "shipped.py"), path
        assert of_numba <= {"numba", "numba.extending", "llvmlite", "llvmlite.binding"}, path
        keywords = {node.arg for node in nodes_of_kind(tree, ast.keyword)}
        assert not keywords & {"fastmath", "parallel"}, path
