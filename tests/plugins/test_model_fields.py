"""Fields of a model are chosen by no run and varied by no search that does not name them."""

from __future__ import annotations

from pathlib import Path

import pytest

from npusim import explore, run
from npusim.config.tiling import tile_fields, tiling_fields
from npusim.library import find_schedule
from npusim.simulation.request import Request
from npusim.studies.explore.space import SearchRequest

HERE = Path(__file__).parent
SPARSE, WINDOW = f"{HERE / 'fields_of_a_model.py'}:SPARSE", f"{HERE / 'window.py'}:WINDOW"
KERNEL = """
import triton
import triton.language as tl


@triton.jit
def copied(q, o, D: tl.constexpr, block_q: tl.constexpr):
    at = tl.program_id(0) * block_q + tl.arange(0, block_q)
    at = at[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(o + at, tl.load(q + at))
"""


@pytest.mark.parametrize("hw", ["ascend_910b2", pytest.param("ascend_950", marks=pytest.mark.exhaustive), "h200"])
def test_a_run_chooses_the_tile_and_no_field_of_the_model(hw: str) -> None:
    result = run(SPARSE, workload="smollm2", seq=512, hw=hw, numerics=False)
    assert result.tiling.block == 64  # type: ignore[attr-defined]
    assert run(SPARSE, workload="smollm2", seq=512, hw=hw, tiling={"block": 64}, numerics=False).cycles == result.cycles


def test_fields_of_an_attention_are_the_models_unless_they_say_otherwise() -> None:
    for family in ("ascend", "nvidia"):
        tiling = find_schedule(SPARSE, family).tiling
        kinds = {f.name: f.kind for f in tiling_fields(tiling)}
        assert (kinds["block"], kinds["hint"], kinds["block_q"]) == ("model", "tile", "tile")
        assert "block" not in tile_fields(tiling)
    assert "hint" in SearchRequest(Request(SPARSE, seq=256), (SPARSE,)).auto_axes()


def test_a_declared_space_has_no_field_of_the_model() -> None:
    for name in (SPARSE, WINDOW):
        axes = SearchRequest(Request(name, seq=256), (name,)).auto_axes()
        assert "block_kv" in axes
        assert not axes.keys() & {"window", "sinks", "block"}


def test_a_search_that_varies_a_field_of_the_model_says_so_and_ranks_each_value_apart() -> None:
    found = explore(WINDOW, {"window": [32, 64], "block_kv": [64, 128]}, seq=256, workload="smollm2")
    assert any("window is a parameter of the model" in note for note in found.setting.notes)
    assert "window" in found.setting.scene_names
    assert {o.point["window"] for o in found.feasible} == {32, 64}
    plain = SearchRequest(Request(WINDOW, seq=256), (WINDOW,)).spec({"block_kv": [64, 128]})
    assert not plain.notes
    assert "block_kv" not in plain.scene_names


def test_a_constexpr_of_a_kernel_is_not_chosen(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="npusim[triton] is not installed")
    (tmp_path / "copied.py").write_text(KERNEL)
    name = f"{tmp_path / 'copied.py'}::copied[batch * heads * seq_q // 32](q, o, head_dim, block_q=32)"
    for hw in ("h200", "ascend_910b2"):
        result = run(name, hw=hw, workload="smollm2", seq=256, numerics=False)
        assert result.tiling.block_q == 32  # type: ignore[attr-defined]
        assert "block_q" not in tile_fields(type(result.tiling))
