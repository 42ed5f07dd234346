from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from npusim.config.device import DeviceSpec
from npusim.config.load import list_devices, list_workloads, load_device, load_workload, read_spec
from npusim.config.packaged import packaged_folder
from npusim.config.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

BASE = "schema: npusim.device/1\nextends: ascend_910b2\nname: mine\n"
BASES = "vendor | measured | derived | fitted | assumed"


def _packaged_text() -> str:
    return (packaged_folder("hwconfigs") / "ascend_910b2.yaml").read_text(encoding="utf-8")


def test_every_packaged_device_loads_under_its_own_name() -> None:
    assert [load_device(name).name for name in list_devices()] == list_devices()


def test_every_packaged_workload_loads_under_its_own_name_and_makes_a_problem() -> None:
    workloads = [load_workload(name) for name in list_workloads()]
    assert [workload.name for workload in workloads] == list_workloads()
    assert all(workload.problem().heads for workload in workloads)
    assert all(workload.source for workload in workloads), "a packaged file says if its shapes come from"


def test_names_may_be_spelled_with_a_dash() -> None:
    assert load_device("ascend-910b2") == load_device("ascend_910b2")


def test_paths_load_the_same_as_names() -> None:
    path = packaged_folder("hwconfigs") / "ascend_910b2.yaml"
    assert load_device(path) == load_device(str(path)) == load_device("ascend_910b2")


@pytest.mark.parametrize(
    ("lines", "messages"),
    [
        ("clock: {value: 1.0e9, basis: vendor, source: x}", ["4  clock: unknown key. Did you mean `clock_hz`?"]),
        (
            "clock_hz: 1.8e9",
            [
                "4  clock_hz: 1800000000.0 has neither basis nor source; write "
                f'{{value: 1800000000.0, basis: {BASES}, source: "..."}}'
            ],
        ),
        (
            "clock_hz: {value: 1.8e9, basis: guessed, source: x}",
            ["4  clock_hz.basis: 'guessed' is not one of: 'vendor', 'measured', 'derived', 'fitted' or 'assumed'"],
        ),
        (
            "clock_hz: {value: fast, basis: vendor, source: ''}",
            ["4  clock_hz.source: must not be empty", "4  clock_hz.value: expected a number, got 'fast'"],
        ),
        ("clock_hz: {value: 0, basis: vendor, source: x}", ["4  clock_hz: must be greater than 0"]),
        (
            "group_count: {value: 2.5, basis: vendor, source: x}",
            ["4  group_count.value: expected a whole number, got 2.5"],
        ),
        (
            "group_count: {value: 20, basis: fitted, source: x}",
            ["4  group_count: `fitted_on` is allowed only for a fitted value"],
        ),
        ("family: intel", ["4  family: 'intel' is not one of: 'ascend' or 'nvidia'"]),
        ("frobnicate: 1\nclok_hz: 1", ["4  frobnicate: unknown key; allowed: ", "5  clok_hz: "]),
        (
            "cores.aic.engines.CUBE.model: matrx",
            [
                "4  cores.aic.engines.CUBE.model: 'matrx' is not one of: "
                "'dma', 'fixpipe', 'matrix', 'warp_matrix', 'vector', 'scalar', 'lanes', 'shared_memory', 'warps'"
            ],
        ),
        (
            "cores.aic.engines.CUBE.startup_cycle: 1",
            ["4  cores.aic.engines.CUBE.startup_cycle: unknown key. Did you mean `startup_cycles`?"],
        ),
        (
            "cores.aic.engines.MTE1.routes.l1_l0a.destination: L0D",
            [
                "4  cores.aic.engines.MTE1.routes.l1_l0a.destination: 'L0D' does not exist here; "
                "allowed: GM, L0A, L0B, L0C, L1, UB"
            ],
        ),
        (
            "cores.aic.engines.MTE1.routes.l1_l0a.source: UB\ncores.aic.engines.MTE1.routes.l1_l0a.destination: GM",
            [
                "4  cores.aic.engines.MTE1.routes.l1_l0a.source: UB to GM: one of them must be a buffer of aic, "
                "whose engine moves it; its buffers: L0A, L0B, L0C, L1"
            ],
        ),
        (
            "cores.aic.engines.MTE2.routes.gm_l1.links: [l2, hbn]",
            ["4  cores.aic.engines.MTE2.routes.gm_l1.links: 'hbn' does not exist here; allowed: hbm, l2"],
        ),
        (
            "cores.aic.per_group_count: {value: 2, basis: vendor, source: x}",
            ["4  cores.aic.per_group_count: must be 1: a core group has one AIC"],
        ),
        ("memory: 5", ["4  memory: expected a mapping, got 5"]),
    ],
)
def test_bad_device_files_are_refused_with_place_value_and_what_is_allowed(
    lines: str, messages: list[str], write: Callable[..., Path], fault: Callable[..., str]
) -> None:
    path = write(f"{BASE}{lines}\n")
    given = fault(load_device, path).splitlines()
    assert len(given) == len(messages)
    for line, message in zip(given, messages, strict=True):
        assert line.startswith(f"{path}:{message}")


def test_a_missing_number_says_how_to_write_it(write: Callable[..., Path], fault: Callable[..., str]) -> None:
    text = "".join(line for line in _packaged_text().splitlines(True) if not line.startswith("clock_hz"))
    path = write(text)
    expected = f'{path}:1  clock_hz: missing; write clock_hz: {{value: ..., basis: {BASES}, source: "..."}}'
    assert fault(load_device, path) == expected


def test_a_number_missing_deep_down_names_its_parents_line(
    write: Callable[..., Path], fault: Callable[..., str]
) -> None:
    lines = _packaged_text().splitlines(True)
    kept = [line for line in lines if not line.lstrip().startswith("block_dispatch_cycles")]
    launch = kept.index("launch:\n") + 1
    path = write("".join(kept))
    expected = f"{path}:{launch}  launch.block_dispatch_cycles: missing; write block_dispatch_cycles"
    assert fault(load_device, path).startswith(expected)


def test_duplicate_keys_are_refused(write: Callable[..., Path], fault: Callable[..., str]) -> None:
    path = write(f"{BASE}name: twice\n")
    assert fault(load_device, path) == f"{path}:4  name: duplicate key; first given in line 3"


def test_unknown_names_list_what_there_is(fault: Callable[..., str]) -> None:
    known = ", ".join(list_devices())
    assert fault(load_device, "ascend_910b22") == (
        f"no device named 'ascend_910b22'. Did you mean `ascend_910b2`? Known: {known}"
    )
    assert fault(load_device, "tpu") == f"no device named 'tpu'; allowed: {known}"
    assert fault(load_workload, "pangu").startswith("no workload named 'pangu'. Did you mean `pan")
    assert fault(load_workload, "./no.yaml") == "no.yaml: no such workload file"


def test_schemas_are_json_and_refuse_unknown_keys() -> None:
    for schema in (DeviceSpec.model_json_schema(), Workload.model_json_schema()):
        assert json.loads(json.dumps(schema)) == schema
        assert schema["additionalProperties"] is False
        properties = schema["properties"]
        assert isinstance(properties, dict)
        assert "schema" in properties


def test_loading_needs_no_numpy_networkx_or_numba() -> None:
    code = (
        "import sys, npusim.config.load as l; l.load_device('ascend_910b4'); "
        "l.load_workload('smollm2'); import npusim.config.cases, "
        "npusim.config.huggingface, npusim.config.tiling; "
        "assert not {'numpy', 'networkx', 'numba'} & set(sys.modules), sorted(sys.modules)"
    )
    root = str(packaged_folder("hwconfigs").parent)
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root)


def test_loading_a_device_is_quick() -> None:
    load_device("ascend_910b2")
    times = []
    for _ in range(3):
        start = time.process_time()
        load_device("ascend_910b2")
        times.append(time.process_time() - start)
    # 0.04 s here; the start of every command pays it, so it must stay below 0.15 s.
    assert min(times) < 0.15


def test_packaged_files_are_parsed_once_and_anew_when_one_of_them_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "hwconfigs"
    shutil.copytree(packaged_folder("hwconfigs"), folder)
    for module in ("npusim.config.packaged", "npusim.config.load"):
        monkeypatch.setattr(f"{module}.packaged_folder", lambda kind: tmp_path / kind)
    before = read_spec("device", "ascend_910b2")
    assert read_spec("device", "ascend_910b2") is before
    assert load_device("ascend_910b3").clock_hz.value == 1.8e9
    base = folder / "ascend_910b2.yaml"
    base.write_text(base.read_text().replace("clock_hz: {value: 1.8e9", "clock_hz: {value: 1.81e9"))
    assert read_spec("device", "ascend_910b2") is not before
    for name in ("ascend_910b2", "ascend_910b3"):
        assert load_device(name).clock_hz.value == 1.81e9, "what extends it changes with it"
