from __future__ import annotations

from typing import TYPE_CHECKING

from npusim.spec import packaged

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import pytest


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
