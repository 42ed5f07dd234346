"""What users see of the package, and what importing it costs."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

import npusim

if TYPE_CHECKING:
    from pathlib import Path

HEAVY = (
    "numpy",
    "simpy",
    "networkx",
    "pydantic",
    "numba",
    "ml_dtypes",
    "ruamel",
    "pandas",
    "plotly",
    "rich",
    "altair",
    "jinja2",
)


def python(code: str, repository: Path) -> str:
    """Return what a new interpreter prints, run in the checkout."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd=repository,
        env={**os.environ, "PYTHONPATH": str(repository)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_package_shows_at_most_twenty_names_and_no_others() -> None:
    assert dir(npusim) == sorted(npusim.__all__)
    assert len(dir(npusim)) <= 20


@pytest.mark.parametrize("name", npusim.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(npusim, name) is not None


def test_every_error_is_caught_by_the_public_name() -> None:
    with pytest.raises(npusim.NpusimError, match="unknown schedule"):
        npusim.run("flsh")


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'npusim' has no attribute 'flash'"):
        npusim.flash  # noqa: B018


def test_importing_the_package_imports_nothing_heavy(repository: Path) -> None:
    code = f"import npusim, sys; print([m for m in {HEAVY!r} if m in sys.modules])"
    assert python(code, repository) == "[]"


def test_importing_numbers_compiles_nothing(repository: Path) -> None:
    code = "import npusim.formats, sys; print('numba' in sys.modules)"
    assert python(code, repository) == "False"


def test_run_is_the_function_whoever_imports_its_module_first(repository: Path) -> None:
    """Each in a copy of an interpreter that has imported what npusim needs, and nothing of npusim."""
    codes = [
        "import npusim.run; import npusim; print(callable(npusim.run))",
        "import npusim; npusim.run; import npusim.run; print(callable(npusim.run))",
        "from npusim.run import RunResult; import npusim; print(callable(npusim.run))",
        "from npusim import run; print(callable(run))",
        "from npusim.run import run; import npusim; print(npusim.run is run)",
        "import importlib, npusim; m = importlib.import_module('npusim.run'); print(m.run is npusim.run)",
    ]
    script = (
        "import os, sys, numpy, pydantic\n"
        f"for code in {codes!r}:\n"
        "    if not os.fork():\n"
        "        assert not any(name.startswith('npusim') for name in sys.modules)\n"
        "        exec(code)\n"
        "        sys.stdout.flush()\n"
        "        os._exit(0)\n"
        "    assert not os.wait()[1]\n"
    )
    assert python(script, repository).split() == ["True"] * len(codes)


def test_submodules_named_in_the_design_are_reached_from_a_bare_import(repository: Path) -> None:
    code = (
        "import npusim; print(npusim.formats.cast(500.0, 'float8_e4m3fn', overflow='saturate').item(), "
        "npusim.errors.SpecError.__name__)"
    )
    # The largest finite E4M3FN number is 448.
    assert python(code, repository) == "448.0 SpecError"


def test_the_version_is_that_of_the_project_file(repository: Path) -> None:
    import tomllib

    project = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))
    assert npusim.__version__ == project["project"]["version"]
