"""Start-up, compilation notice and disk cache."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import npusim.formats

PACKAGE = Path(npusim.formats.__file__).parent
ROOT = PACKAGE.parent.parent
CAST = "import numpy as np, npusim.formats as f; print(f.cast(np.float32([1.5]), 'float16')[0])"


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=variables,
        check=True,
        timeout=120,
    )


def test_importing_formats_does_not_import_numba() -> None:
    code = "import sys, npusim.formats; print('numba' in sys.modules)"
    assert run(code).stdout.strip() == "False"


def test_first_use_says_that_it_compiles_and_the_cache_keeps_it_silent(tmp_path: Path) -> None:
    first = run(CAST, NUMBA_CACHE_DIR=str(tmp_path))
    assert first.stdout.strip() == "1.5"
    assert first.stderr.count("\n") == 1
    assert first.stderr.startswith("npusim: compiling numeric kernels")
    second = run(CAST, NUMBA_CACHE_DIR=str(tmp_path))
    assert (second.stdout.strip(), second.stderr) == ("1.5", "")


def test_unusable_cache_folder_still_works(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    done = run(CAST, NUMBA_CACHE_DIR=str(blocked / "cache"))
    assert done.stdout.strip() == "1.5"


def test_no_place_to_cache_at_all_still_works() -> None:
    # What numba raises for a read-only install without a home directory.
    code = (
        "import numba; plain = numba.njit\n"
        "def njit(*args, cache=False, **options):\n"
        "    if cache: raise RuntimeError('cannot cache function: no locator available')\n"
        "    return plain(*args, **options)\n"
        "numba.njit = njit\n" + CAST
    )
    assert run(code).stdout.strip() == "1.5"


def test_an_edited_source_file_makes_cached_code_stale() -> None:
    from npusim.formats import cast_kernels, jit

    stamp: Any = cast_kernels.widen_float16
    assert stamp._cache._cache_file._source_stamp[1] == jit._sources_stamp()
    assert {name for name, _, _ in jit._sources_stamp()} >= {
        "mma_scalar.py",
        "reduction_kernels.py",
    }


#: What numpy, BLAS and libm compute in ways that change with the CPU, as functions and as methods.
FORBIDDEN = {
    "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "tanh", "sin", "cos", "power", "pow",
    "dot", "vdot", "einsum", "matmul", "inner", "tensordot", "sum", "nansum", "mean",
}  # fmt: skip
#: Everything that computes a bit of a result: formats, the executor, and sums of collectives.
BITS = [
    *sorted(PACKAGE.glob("*.py")),
    *(PACKAGE.parent / "numerics" / f"{name}.py" for name in ("executor", "lanes", "semantics", "store")),
    PACKAGE.parent / "node" / "reduction.py",
]  # fmt: skip


@pytest.mark.parametrize("path", BITS, ids=lambda path: path.name)
def test_no_bits_depend_on_numpys_dispatch(path: Path) -> None:
    tree = ast.parse(path.read_text())
    ours = ("formats", "context", "exact")  # npusim's own functions, and decimal's
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and not (isinstance(node.value, ast.Name) and node.value.id in ours)
    }
    assert used & FORBIDDEN == set()
    assert not any(
        isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult) for node in ast.walk(tree)
    )


def test_kernels_are_compiled_without_licence_to_reorder() -> None:
    """One place calls numba, and never with `fastmath` or `parallel`, which would reorder sums."""
    for path in PACKAGE.glob("*.py"):
        tree = ast.parse(path.read_text())
        imports = {
            n.name for node in ast.walk(tree) if isinstance(node, ast.Import) for n in node.names
        }
        imports |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert path.name == "jit.py" or not any((n or "").startswith("numba") for n in imports), (
            path
        )
        keywords = {node.arg for node in ast.walk(tree) if isinstance(node, ast.keyword)}
        assert not keywords & {"fastmath", "parallel"}, path


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("*.py")), ids=lambda path: path.name)
def test_files_and_functions_stay_small(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 60, node.name
