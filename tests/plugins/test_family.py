"""A core family from outside the package: one module and one device file, registered as a plug-in would."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import npusim
from npusim.config.load import load_device
from npusim.config.problem import Problem
from npusim.config.tiling import build_tiling
from npusim.errors import SpecError, TilingError
from npusim.library import find_schedule
from npusim.program.ir.check import check
from npusim.simulation.chosen_tile import _outside_files

HERE = Path(__file__).parent
HW = str(HERE / "unified_core.yaml")
SIZES: dict[str, Any] = {"heads": 2, "kv_heads": 1, "seq_q": 150, "seq_kv": 300, "head_dim": 64}
TILES = {"block_q": 64, "block_kv": 128}
ENTRY_POINTS = """
[npusim.machines]
unified = unified_core:UNIFIED
bare = unified_core:UnifiedMachine
rich = rich_cores:RICH
renamed = unified_core:UNIFIED
machineless = rich_cores:RichFields
broken = unified_core:CORE
[npusim.schedules]
late = late_on_unified:LATE
"""
#: Its module is loaded when the family is there: it is for all there are, this one too.
RICH = """
from unified_core import UnifiedMachine

from npusim.kernel import Blocks, Field
from npusim.machine import CoreFamily


class RichFields(Blocks):
    block_kv: int = Field(default=64, ge=16, multiple_of=16, description="keys of a tile")
    lanes: int = Field(default=2, ge=1, description="lanes of a core")


RICH = CoreFamily(
    name="rich",
    machine="unified_core:UnifiedMachine",
    fields={"attention": RichFields},
    presets={"sum_order": "tree_halves"},
    settings={"attention": [[{"block_kv": 128}, {"block_kv": 32}]]},
    unread={"memory.gm.capacity_bytes": "machines that store rings there"},
    cores=("core",),
)
"""
LATE = """
from late_scale import LATE_SCALE
LATE = LATE_SCALE
"""


@pytest.fixture(autouse=True)
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "unified-core", ENTRY_POINTS)
    (tmp_path / "late_on_unified.py").write_text(LATE, encoding="utf-8")
    (tmp_path / "rich_cores.py").write_text(RICH, encoding="utf-8")
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(HERE), *sys.path])


def install(folder: Path, package: str, points: str) -> None:
    """Put a package with entry points on a path: what pip leaves of an installed one."""
    info = folder / f"{package.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(points, encoding="utf-8")


def run(schedule: str, hw: str, **more: Any) -> Any:
    sizes = {**SIZES, "causal": more.pop("causal", True)}
    drawn = {"rows": "all", "seed": 3} if more.get("numerics", True) else {}
    return npusim.run(schedule, hw=hw, problem=Problem(**sizes), tiling=TILES, trace_groups=(), **drawn, **more)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("schedule", "rmse"), [("flash", 1e-3), ("pasa", 5e-3)])  # pasa: float16 throughout
def test_its_bits_are_those_of_a_machine_of_the_same_arithmetic(schedule: str, rmse: float, causal: bool) -> None:
    """Matrix arithmetic, order of row sums and exponential are the 910B2's; slices and hand-overs are not."""
    here = run(schedule, HW, causal=causal)
    there = run(schedule, "ascend_910b2", causal=causal)
    assert here.numerics.error.rmse < rmse
    assert np.array_equal(here.output.view(np.uint16), there.output.view(np.uint16))


@pytest.mark.parametrize("schedule", ["flash", "pasa"])
def test_its_time_is_that_of_the_reference_and_races_are_ruled_out(schedule: str) -> None:
    times = {method: run(schedule, HW, numerics=False, method=method).timing for method in ("des", "block", "auto")}
    assert len({t.cycles for t in times.values()}) == 1
    device, chosen = load_device(HW), find_schedule(schedule, "unified")
    problem = Problem(**SIZES, causal=True)
    program = chosen.program(problem, build_tiling(chosen.tiling, TILES), device, chosen.precision())
    check(program, device.flags)
    fractals = program.flops / 2 / 16**3
    assert times["des"].cycles > fractals / device.group_count.value, "quicker than its products alone"


def test_a_faster_matrix_unit_takes_less_time() -> None:
    slow = run("flash", HW, numerics=False, overrides={"cores.core.engines.MATRIX.cycles_per_fractal": "8"})
    assert slow.timing.cycles > run("flash", HW, numerics=False).timing.cycles


def test_a_users_own_schedule_runs_on_it_too() -> None:
    assert run("late", HW).numerics.error.rmse < 1e-3


def test_what_it_has_no_way_for_is_refused() -> None:
    with pytest.raises(TilingError, match="O belongs to the vector unit; use accumulate=fresh"):
        run("flash", HW, precision="accumulate=chained")
    with pytest.raises(SpecError, match="schedule 'gemm' has no mapping for unified cores; it runs on ascend"):
        run("gemm", HW)


def test_it_needs_the_public_surface_alone() -> None:
    tree = ast.parse((HERE / "unified_core.py").read_text(encoding="utf-8"))
    modules = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert {m for m in modules if m and m.startswith("npusim")} == {"npusim.kernel", "npusim.machine"}


@pytest.mark.parametrize(
    ("points", "hw", "message"),
    [
        (
            "[npusim.machines]\nascend = other:M\n",
            "ascend_910b2",
            "family: 'ascend' is defined by npusim itself and by other:M (other 1.0); uninstall one of them, or rename",
        ),
        (
            "[npusim.machines]\nunified = other:M\n",
            HW,
            "'unified' is defined by other:M (other 1.0) and by unified_core:UNIFIED (unified-core 1.0)",
        ),
        (
            "[npusim.schedules]\nlate = other:LATE\n",
            HW,
            "schedule 'late' is defined by other:LATE (other 1.0) and by late_on_unified:LATE (unified-core 1.0)",
        ),
    ],
)
def test_two_of_one_name_are_refused_with_both_origins(
    points: str, hw: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "other", "other", points)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "other"), *sys.path])
    with pytest.raises(SpecError, match=re.escape(message)):
        run("late" if "schedules" in points else "flash", hw)
    assert npusim.run("flash", hw="h200", seq=128, rows="all").numerics if "machines" in points else True


def test_faults_of_a_family_are_told(tmp_path: Path) -> None:
    text = Path(HW).read_text(encoding="utf-8")
    for family, message in (
        ("unifed", "'rich' or 'unified'; an installed package brings one as an entry point npusim.machines"),
        ("broken", "unified_core:CORE: entry point 'broken' of npusim.machines is neither an npusim.machine.Machine"),
        ("renamed", "unified_core:UNIFIED: entry point 'renamed' of npusim.machines: its manifest is of family 'unif"),
        ("machineless", "rich_cores:RichFields: entry point 'machineless' of npusim.machines: <class 'rich_cores.Rich"),
    ):
        file = tmp_path / f"{family}.yaml"
        file.write_text(text.replace("family: unified", f"family: {family}"), encoding="utf-8")
        with pytest.raises(SpecError, match=re.escape(message)):
            run("late", str(file))


def of_family(name: str, folder: Path, old: str = "", new: str = "") -> str:
    """Return the device file of another family with the same cores."""
    file = folder / f"{name}.yaml"
    text = Path(HW).read_text(encoding="utf-8").replace("family: unified", f"family: {name}")
    file.write_text(text.replace(old, new) if old else text, encoding="utf-8")
    return str(file)


def test_a_machine_alone_stands_for_its_manifest(tmp_path: Path) -> None:
    bare, unified = run("flash", of_family("bare", tmp_path), numerics=False), run("flash", HW, numerics=False)
    assert bare.cycles == unified.cycles


def test_a_manifest_has_fields_presets_settings_and_keys_of_its_own(tmp_path: Path) -> None:
    hw = of_family("rich", tmp_path)
    schedule = find_schedule("flash", "rich")
    assert build_tiling(schedule.tiling, {"lanes": "3"}).model_dump() == {"block_q": 128, "block_kv": 64, "lanes": 3}
    assert getattr(schedule.precision(), "sum_order") == "tree_halves"  # noqa: B009 - a field of this precision alone
    chosen = npusim.run("flash", hw=hw, problem=Problem(**SIZES), numerics=False, trace_groups=())
    call: dict[str, Any] = {"hw": hw, "problem": Problem(**SIZES), "numerics": False, "trace_groups": ()}
    times = [npusim.run("flash", tiling={"block_kv": n}, **call).cycles for n in (32, 64, 128)]
    assert chosen.cycles == min(times) < max(times)
    with pytest.raises(TilingError, match="lanes: unknown tiling field"):
        npusim.run("flash", hw=HW, problem=Problem(**SIZES), tiling={"lanes": 3}, numerics=False)
    with pytest.raises(SpecError, match="schedule 'pasa' has no mapping for rich cores"):
        run("pasa", hw)
    with pytest.raises(SpecError, match=r"memory.gm.capacity_bytes.*machines that store rings there"):
        run("flash", hw, overrides={"memory.gm.capacity_bytes": "1e9"})


def test_a_chosen_tile_holds_until_the_manifest_changes(tmp_path: Path) -> None:
    device = load_device(of_family("rich", tmp_path))
    files = _outside_files(find_schedule("flash", "rich"), device, ())
    assert {Path(file).name for file in files} == {"rich_cores.py", "unified_core.py"}


def test_a_device_file_has_the_cores_of_its_manifest(tmp_path: Path) -> None:
    hw = of_family("unified", tmp_path, "\n  core:\n", "\n  other:\n")
    with pytest.raises(SpecError, match="unified devices have a core kind `core`; missing"):
        run("flash", hw)


def test_a_family_of_the_package_is_one_value_and_one_line(tmp_path: Path) -> None:
    """The walk "add a family": its folder with a manifest, and the line in `FAMILIES`; no other file knows of it."""
    line = '{**family.FAMILIES, "unified": "unified_core:UNIFIED"}'
    script = f"""
import npusim.config.family as family
family.FAMILIES = {line}
import npusim
from npusim.library import SCHEDULES
print(sorted(name for name, of in SCHEDULES if of == "unified"))
print(npusim.run("flash", hw={HW!r}, seq=128, numerics=False, trace_groups=()).cycles > 0)
"""
    paths = {"PYTHONPATH": f"{HERE.parents[1]}:{HERE}", "PATH": "", "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=paths, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == ["['flash', 'flash_backward', 'fp8_attention', 'pasa']", "True"], done.stderr
