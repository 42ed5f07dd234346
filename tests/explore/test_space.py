from __future__ import annotations

from typing import Literal

import pytest

from npusim.config.tiling import Field, Tiling
from npusim.errors import TilingError
from npusim.simulation.request import Request
from npusim.studies.explore.space import SearchRequest, checked_axes, chunks, combinations, declared, parse_field


class _Tiling(Tiling):
    block: int = Field(default=16, ge=16, multiple_of=16, description="size")
    depth: int = Field(default=1, ge=0, le=4, description="slots")
    order: Literal["up", "down"] = Field(default="up", description="direction")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("block=16", ("block", (16,))),
        ("block=16, 32", ("block", (16, 32))),
        ("block=128:1024:256", ("block", (128, 384, 640, 896))),
        ("block=128:1024:128", ("block", tuple(range(128, 1025, 128)))),
        ("block=8,16:32:8", ("block", (8, 16, 24, 32))),
        ("beta=0.5,1.5", ("beta", (0.5, 1.5))),
        ("order=up,down", ("order", ("up", "down"))),
    ],
)
def test_fields_are_lists_and_ranges_with_their_ends(text: str, expected: object) -> None:
    assert parse_field(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("block", "write name=value"),
        ("=1", "write name=value"),
        ("block=", "a value is empty"),
        ("block=1,,2", "a value is empty"),
        ("block=1:2", "'1:2' is not a range; write start:stop:step"),
        ("block=a:b:c", "is not a range"),
        ("block=4:1:1", "an empty range"),
        ("block=1:4:0", "an empty range"),
        ("block=1:300000000:1", "300,000,000 points or more; allowed: 1,000,000"),
        ("block=1:600000:1,1:600000:1", "1,200,000 points or more"),
    ],
)
def test_malformed_fields_say_how_to_write_one(text: str, message: str) -> None:
    with pytest.raises(TilingError) as caught:
        parse_field(text)
    assert message in str(caught.value)
    assert repr(text) in str(caught.value)


def test_grid_is_every_combination_once_last_field_fastest() -> None:
    axes = checked_axes({"block": [16, 32, 16], "order": ("up", "down")}, ["block", "order"])
    assert list(combinations(axes)) == [
        {"block": 16, "order": "up"},
        {"block": 16, "order": "down"},
        {"block": 32, "order": "up"},
        {"block": 32, "order": "down"},
    ]


def test_unknown_missing_and_empty_fields_are_refused() -> None:
    with pytest.raises(TilingError, match=r"blok: unknown tiling field\. Did you mean `block`\?"):
        checked_axes({"blok": [1]}, ["block", "order"])
    with pytest.raises(TilingError, match="block: no values to try"):
        checked_axes({"block": []}, ["block", "order"])


def test_more_points_than_a_search_can_have_are_refused_by_their_count() -> None:
    known, thousand = ["a", "b"], tuple(range(1001))
    with pytest.raises(TilingError, match=r"a b: 1,002,001 points or more; allowed: .*; fix some .* a=\.\.\."):
        checked_axes({"a": thousand, "b": thousand}, known)


def test_a_declared_space_has_choices_and_doublings() -> None:
    found = declared(_Tiling)
    assert found == {"block": (16, 32, 64, 128, 256, 512, 1024), "depth": (0, 1, 2, 4), "order": ("up", "down")}


def test_neighbours_are_a_task() -> None:
    points = {i: {"a": i // 40, "b": i % 40} for i in range(120)}
    assert [len(part) for part in chunks(points)] == [40, 40, 40]
    assert [len(part) for part in chunks({i: points[i] for i in range(10)})] == [10]


@pytest.mark.parametrize(("hw", "axes"), [("ascend_910b2_x8", {"algorithm", "blocks"}), ("v100_x8", {"offload"})])
def test_a_models_space_holds_what_is_chosen_and_not_what_is_asked_for(hw: str, axes: set[str]) -> None:
    """Tokens to come are asked for, layers on the host follow from memory, and a host that is missing takes none."""
    space = SearchRequest(Request("layer", workload="llama2_7b", hw=hw), ("layer",)).auto_axes()
    assert axes <= space.keys()
    assert not space.keys() & {"output", "gpu_layers", "cpu_layers"}
    assert ("offload" in space) == (hw == "v100_x8")


def test_a_tiling_field_is_no_axis_of_another_schedules_precision_with_other_values() -> None:
    """PASA's tile has ``scale_in=matrix``; flash has a precision field of that name, without that value."""
    both = SearchRequest(Request("pasa", seq=256), ("pasa", "flash"))
    spaces = both.spec({"scale_in": ("matrix", "queries"), "block_kv": (128,)}).spaces
    assert spaces["pasa"]["scale_in"] == ("matrix", "queries")
    assert "scale_in" not in spaces["flash"]
    assert both.spec({"scale_in": ("queries",)}).spaces["flash"]["scale_in"] == ("queries",)
