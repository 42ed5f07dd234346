"""The README's figures: drawn at the tiles that runs choose, at the numbers that the README's text has."""

from __future__ import annotations

import json
import re
import tomllib
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest

import npusim
from npusim.config.load import load_device
from reports.front.drawing import HEIGHT, NARROW_HEIGHT, NARROW_WIDTH, WIDTH, badge, drawing
from reports.front.page import DEVICE, TOKENS

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def usual(repository: Path) -> dict[str, dict[str, object]]:
    """Return the committed points of the figure by their names."""
    data = json.loads((repository / "reports" / "front" / "front.json").read_text(encoding="utf-8"))
    return {point["name"]: point for point in data["points"]["usual"]}


@pytest.mark.parametrize(("name", "schedule"), [("pasa fp16_mean", "pasa"), ("flash fa2_fp32", "flash")])
def test_the_figure_has_the_time_of_a_run_with_nothing_named(
    usual: dict[str, dict[str, object]], name: str, schedule: str
) -> None:
    result = npusim.run(schedule, hw=DEVICE, seq=TOKENS, numerics=False)
    assert float(f"{result.latency_us:.3e}") == usual[name]["latency_us"]
    assert str(usual[name]["tile"]).startswith(f"{result.tiling.block_q} x {result.tiling.block_kv}")  # type: ignore[union-attr]


def test_the_readme_says_what_its_figure_shows(usual: dict[str, dict[str, object]], repository: Path) -> None:
    """Every latency of a run of 4,096 tokens that the README prints is that of the figure's point."""
    text = (repository / "README.md").read_text(encoding="utf-8")
    assert "reports/front/front.svg" in text
    printed = re.findall(r"\$ npusim run (pasa|flash)\n(?:.*\n)*?\s+latency\s+([\d.]+) us a call", text)
    assert printed
    for schedule, latency in printed:
        name = {"pasa": "pasa fp16_mean", "flash": "flash fa2_fp32"}[schedule]
        assert float(f"{float(latency):.3e}") == usual[name]["latency_us"]
    page = (repository / "reports" / "front" / "front.md").read_text(encoding="utf-8")
    for schedule, latency in re.findall(r"`npusim run (pasa|flash)` takes ([\d.]+) us", page):
        name = {"pasa": "pasa fp16_mean", "flash": "flash fa2_fp32"}[schedule]
        assert float(f"{float(latency):.3e}") == usual[name]["latency_us"]


@pytest.mark.parametrize(
    ("file", "is_narrow", "limits"),
    [("simulated", False, (WIDTH, HEIGHT)), ("simulated_narrow", True, (NARROW_WIDTH, NARROW_HEIGHT))],
)
def test_the_drawing_has_the_numbers_of_the_device_and_stays_in_its_cards(
    file: str, is_narrow: bool, limits: tuple[int, int], repository: Path
) -> None:
    text = drawing(DEVICE, is_narrow=is_narrow)
    assert text == (repository / "reports" / "front" / f"{file}.svg").read_text(encoding="utf-8")
    root = ElementTree.fromstring(text)
    words = [element for element in root.iter() if element.tag.endswith("text")]
    said = " ".join(element.text or "" for element in words)
    device = load_device(DEVICE)
    assert f"one of {device.group_count.value} core groups" in said
    for name, core in (("L1", "aic"), ("L0C", "aic"), ("UB", "aiv")):
        size = int(device.cores[core].buffers[name].capacity_bytes.value)
        assert f"{name} {size // 1024} KiB" in said
    # A letter of the widest usual font takes eight pixels of the thirteen of its height.
    for element in words:
        width = 7.4 * len(element.text or "")
        before = {"middle": width / 2, "end": width}.get(element.get("text-anchor") or "", 0.0)
        left = float(element.get("x", 0)) - before
        assert left >= 0, element.text
        assert left + width <= limits[0], element.text
        assert float(element.get("y", 0)) <= limits[1]
    assert "prefers-color-scheme: dark" in text
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), "no request leaves"


def test_the_readmes_pictures_have_a_form_for_narrow_screens(repository: Path) -> None:
    """At 390 pixels a picture has letters of 9 pixels or more, and does not scroll."""
    text = (repository / "README.md").read_text(encoding="utf-8")
    narrow = re.findall(r'<source media="\(max-width: 600px\)" srcset="([^"]+)"><img src="([^"]+)" alt="[^"]', text)
    assert [wide for _, wide in narrow] == ["reports/front/simulated.svg", "reports/front/front.svg"]
    for name, wide in narrow:
        assert (repository / wide).is_file()
        head = re.search(r'viewBox="0 0 (\d+) (\d+)"', (repository / name).read_text(encoding="utf-8"))
        assert head is not None
        assert int(head[1]) <= 358 * 11 / 9
        assert int(head[2]) > int(head[1])


@pytest.mark.parametrize("is_narrow", [False, True])
def test_the_drawing_needs_no_style_sheet(is_narrow: bool) -> None:
    """Renderers of package indexes and viewers without CSS drew it black."""
    plain = re.sub(r"(?s)<style>.*?</style>", "", drawing(DEVICE, is_narrow=is_narrow))
    root = ElementTree.fromstring(plain)
    for element in root.iter():
        if element.tag.rpartition("}")[2] in ("rect", "path"):
            assert element.get("fill"), ElementTree.tostring(element)
        assert "var(" not in (element.get("fill") or "")
    (group,) = [element for element in root.iter() if element.tag.endswith("}g")]
    assert group.get("fill")
    assert group.get("font-family")


@pytest.mark.parametrize(
    ("file", "name", "key"), [("licence", "licence", "license"), ("python", "python", "requires-python")]
)
def test_a_badge_states_what_the_package_states(file: str, name: str, key: str, repository: Path) -> None:
    project = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    value = project[key].replace(">=", "") + (" or later" if ">=" in project[key] else "")
    text = (repository / "reports" / "front" / f"{name}.svg").read_text(encoding="utf-8")
    assert text == badge(name, value)
    assert "style" not in text
