from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

import npusim
from npusim.cli.app import app
from npusim.config import packaged
from npusim.config.load import list_devices, load_device
from npusim.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


def test_folders_inside_the_package_come_before_those_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The layout of an installed wheel: npusim/hwconfigs.
    inside = tmp_path / "npusim" / "hwconfigs"
    inside.mkdir(parents=True)
    (tmp_path / "hwconfigs").mkdir()
    (inside / "only.yaml").touch()
    monkeypatch.setattr(packaged, "_PACKAGE", tmp_path / "npusim")
    assert packaged.packaged_folder("hwconfigs") == inside
    assert packaged.list_packaged("hwconfigs") == ["only"]


def test_missing_folders_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Callable[..., str]
) -> None:
    monkeypatch.setattr(packaged, "_PACKAGE", tmp_path / "npusim")
    assert fault(packaged.packaged_folder, "hwconfigs").startswith("the packaged folder hwconfigs")


def test_packaged_tensors_are_found_with_and_without_suffix() -> None:
    name = "smollm2_layer18_group"
    path = packaged.packaged_tensors(name)
    assert path is not None
    assert path == packaged.packaged_tensors(f"{name}.safetensors")
    assert path.stat().st_size == 655736
    assert f"{name}.safetensors" in packaged.list_tensors()
    assert packaged.packaged_tensors("elsewhere") is None


@pytest.fixture
def offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An installed package with devices, and its entry point."""
    folder = tmp_path / "vendor_devices"
    folder.mkdir()
    (folder / "__init__.py").touch()
    info = tmp_path / "vendor-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vendor\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[npusim.devices]\nvendor = vendor_devices\n")
    monkeypatch.syspath_prepend(tmp_path)
    packaged.installed_folders.cache_clear()
    yield folder
    packaged.installed_folders.cache_clear()


def test_an_installed_package_brings_devices_and_nodes(offered: Path) -> None:
    (offered / "vendor_910.yaml").write_text(
        "schema: npusim.device/1\nextends: ascend_910b2\nname: vendor_910\ndescription: a test\n"
        "clock_hz: {value: 1000000000, basis: assumed, source: a test}\n"
    )
    assert "vendor_910" in list_devices()
    assert load_device("vendor-910").clock_hz.value == 10**9
    assert npusim.run("flash", hw="vendor_910", seq=128, numerics=False, trace_groups=()).cycles > 0
    with pytest.raises(SpecError, match="Did you mean `vendor_910`"):
        load_device("vendor_91")


def test_two_devices_of_one_name_are_refused_with_both_files_where_it_is_named(offered: Path) -> None:
    (offered / "v100.yaml").touch()
    with pytest.raises(
        SpecError, match=r"vendor_devices/v100\.yaml: 'v100' is already the name of .*hwconfigs/v100\.yaml"
    ):
        load_device("v100")
    assert load_device("h200").name == "h200"


def test_an_entry_point_without_a_package_is_told_and_stops_nothing_else(offered: Path) -> None:
    text = offered.parent / "vendor-1.0.dist-info" / "entry_points.txt"
    text.write_text("[npusim.devices]\nvendor = nowhere.at_all\n")
    broken = "entry point vendor of npusim.devices: 'nowhere.at_all' is not a package"
    assert load_device("h200").name == "h200"
    listed = CliRunner().invoke(app, ["hw", "list"])
    assert (listed.exit_code, "ascend_910b2" in listed.stdout) == (0, True)
    assert listed.stderr == f"npusim: {broken} with a folder; its devices are omitted\n"
    with pytest.raises(SpecError, match=re.escape(broken)):
        load_device("vendor_910")


def test_looking_for_devices_imports_nothing(offered: Path) -> None:
    (offered / "__init__.py").write_text("raise SystemExit('imported')\n")
    (offered / "chips").mkdir()
    (offered / "chips" / "vendor_910.yaml").touch()
    text = offered.parent / "vendor-1.0.dist-info" / "entry_points.txt"
    text.write_text("[npusim.devices]\nvendor = vendor_devices.chips\n")
    assert "vendor_910" in list_devices()
