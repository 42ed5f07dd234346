"""What tests of several folders start from: the default device, data kept beside the repository, flash."""

from __future__ import annotations

import gc
import os
import signal
import sys

# Read when numpy loads: threads cost more than they save on products as small as the tests'.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# What commands print must not hang on the terminal that the tests run in.
os.environ.pop("COLUMNS", None)
# Processes that tests start find the package compiled, as users' do.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import typer.testing
from hypothesis import HealthCheck, given, settings, strategies

from npusim.config.load import load_device
from npusim.config.problem import Problem
from npusim.config.tiling import build_tiling
from npusim.library import find_schedule
from npusim.program.timing.precompile import compiled_meanwhile
from tests.declared import declare_tiles, leave_alternatives_out

if TYPE_CHECKING:
    from npusim.config.device import DeviceSpec
    from npusim.program.ir.tile_program import TileProgram

FlashBuilder = Callable[..., "TileProgram"]
REPOSITORY = Path(__file__).resolve().parents[1]

# The tree of commands is made once, not for every command that a test runs in this process.
typer.testing._get_command = cache(typer.testing._get_command)  # type: ignore[attr-defined]

# Every run draws the same examples; `--hypothesis-profile=explore` draws others.  Shared machines
# stall now and then, so that no example has a deadline.
SLOW = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("npusim", derandomize=True, **SLOW)
settings.register_profile("explore", print_blob=True, **SLOW)
settings.load_profile("npusim")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Processes of a run: one a core for the whole suite, none beside this one for a chosen part.

    A few files are done before other processes have started, and benchmarks want the machine alone.
    """
    chosen = config.args_source is pytest.Config.ArgsSource.ARGS or config.option.keyword
    if chosen or "not bench" not in config.option.markexpr:
        return 0
    return min(os.cpu_count() or 1, 8)


def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    """Have the engine compiled, if it is not kept, while the tests' processes start: their first tests all need it."""
    compiling = ExitStack()
    compiling.enter_context(compiled_meanwhile("npusim.simulation.warm"))
    config.add_cleanup(compiling.close)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Append the name of a skipped test to the file that ``SKIPPED_TESTS`` names: CI runs these once more with what
    they need.
    """
    file = os.environ.get("SKIPPED_TESTS")
    if file and report.skipped and not hasattr(report, "wasxfail") and "PYTEST_XDIST_WORKER" not in os.environ:
        with Path(file).open("a", encoding="utf-8") as names:
            names.write(f"{report.nodeid}\n")


# While tests are collected garbage is hardly looked for: there are ever more modules and tests, and they stay.
gc.set_threshold(5_000_000)


def pytest_collection_finish() -> None:
    """Look for garbage among new objects, while processors' caches have them, and not among older ones.

    Millions at once take seconds.  The tests themselves are kept to the end.  Hypothesis looks through everything
    before its first example: now there is least.
    """
    _first_example()
    gc.freeze()
    gc.set_threshold(25_000, 1000, 1000)


@settings(database=None, max_examples=1)
@given(strategies.none())
def _first_example(_nothing: None) -> None:
    pass


@pytest.hookimpl(tryfirst=True)
def pytest_unconfigure() -> None:
    """What is still there at the end is not looked through for garbage: the process ends."""
    if "triton" not in sys.modules:  # whose bindings (nanobind) report each frozen object as a leak
        gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def every_program_is_checked() -> Iterator[None]:
    """No test finds a stored proof: some change functions that build or check programs, which no stamp notices."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("npusim.simulation.simulate.remembered", lambda *call: call[-1]())
        yield


@pytest.fixture
def terminals_sigint() -> Iterator[None]:
    """Processes begun in the test heed SIGINT as they do in a terminal: a shell's background ones ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def repository() -> Path:
    """Root of the checkout."""
    return REPOSITORY


@pytest.fixture(scope="session")
def shared_folder() -> Path:
    """Folder of measurements and golden data beside the checkout; a test without it is skipped."""
    folder = REPOSITORY.parent / "shared"
    if not folder.is_dir():
        pytest.skip(f"{folder} is missing: reference data are not part of this checkout")
    return folder


@pytest.fixture(scope="session")
def device() -> DeviceSpec:
    """The default device."""
    return load_device("ascend_910b2")


@pytest.fixture(scope="module")
def declared_tiles() -> Iterator[None]:
    """Runs of the module have the declared tile where they name none: up to 24 others take longer than most runs."""
    with pytest.MonkeyPatch.context() as patched:
        declare_tiles(patched)
        yield


@pytest.fixture
def declared_tile() -> Iterator[None]:
    """The same for a test among others whose claim is a choice of a tile; not for one that starts processes, which a
    patch does not reach.
    """
    with pytest.MonkeyPatch.context() as patched:
        declare_tiles(patched)
        yield


@pytest.fixture(scope="module")
def own_bits_alone() -> Iterator[None]:
    """Runs of the module compute no bits of alternatives to assumed arithmetic, which take up to a third of a run.

    Rooms whose tests compare the bits of runs use it for all files but those that hold the alternatives.
    """
    with pytest.MonkeyPatch.context() as patched:
        leave_alternatives_out(patched)
        yield


@pytest.fixture(scope="session")
def build_flash(device: DeviceSpec) -> FlashBuilder:
    """Return a function that builds flash on the default device: tiling fields, then the problem's."""
    schedule = find_schedule("flash", device.family)

    def build(tiling: Mapping[str, object] | None = None, precision: str = "fa2_fp32", **fields: Any) -> TileProgram:
        return schedule.program(
            Problem(**fields), build_tiling(schedule.tiling, tiling or {}), device, schedule.precision(precision)
        )

    return build
