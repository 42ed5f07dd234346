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
from reports.front.drawing import HEIGHT, WIDTH, badge, drawing
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


def test_the_drawing_has_the_numbers_of_the_device_and_stays_in_its_cards(repository: Path) -> None:
    text = drawing(DEVICE)
    assert text == (repository / "reports" / "front" / "simulated.svg").read_text(encoding="utf-8")
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
        left = float(element.get("x", 0)) - (width / 2 if element.get("text-anchor") == "middle" else 0)
        assert left >= 0, element.text
        assert left + width <= WIDTH, element.text
        assert float(element.get("y", 0)) <= HEIGHT
    assert "prefers-color-scheme: dark" in text
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), "no request leaves"


def test_the_drawing_needs_no_style_sheet() -> None:
    """Renderers of package indexes and viewers without CSS drew it black."""
    plain = re.sub(r"(?s)<style>.*?</style>", "", drawing(DEVICE))
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
