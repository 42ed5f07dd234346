"""Inputs that users bring: layouts by CANN's names, packed sequences, and what is wrong with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from npusim.errors import TensorError
from npusim.formats import get_format
from npusim.run import run
from npusim.simulation.tensor_files import load_tensors

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("declared_tiles")

BATCH, HEADS, KV_HEADS, TOKENS, SIZE = 2, 4, 2, 48, 32


@pytest.fixture(scope="module")
def bnsd() -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(0)
    return {
        n: rng.standard_normal((BATCH, h, TOKENS, SIZE)).astype(np.float16)
        for n, h in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
    }


def arranged(bnsd: dict[str, np.ndarray[Any, Any]], layout: str) -> dict[str, np.ndarray[Any, Any]]:
    """Return the same inputs in another layout, copied."""
    found = {}
    for name, values in bnsd.items():
        bsnd = np.ascontiguousarray(values.transpose(0, 2, 1, 3))
        shape = {"bsnd": bsnd.shape, "bsh": (BATCH, TOKENS, -1), "tnd": (BATCH * TOKENS, -1, SIZE)}
        found[name] = values if layout == "bnsd" else bsnd.reshape(shape[layout])
    if layout == "tnd":
        found["cu_seqlens"] = np.array([0, TOKENS, 2 * TOKENS])
    return found


def test_what_is_no_array_is_refused_by_name(bnsd: dict[str, np.ndarray[Any, Any]]) -> None:
    lists: Any = {**bnsd, "k": bnsd["k"].tolist()}
    with pytest.raises(TensorError, match="tensors: k is a list; must be a numpy array"):
        load_tensors(lists)


@pytest.mark.parametrize("fmt", ["float16", "bfloat16", "float8_e4m3fn", "float32", "float64"])
def test_safetensors_are_read_in_every_format(fmt: str, bnsd: dict[str, np.ndarray[Any, Any]], tmp_path: Path) -> None:
    given = {name: values.astype(get_format(fmt).dtype) for name, values in bnsd.items()}
    save_file(given, tmp_path / "qkv.safetensors")
    found = load_tensors(tmp_path / "qkv.safetensors")
    assert all(found[n].dtype == given[n].dtype and found[n].tobytes() == given[n].tobytes() for n in "qkv")


def test_tensors_are_run_under_their_own_name_or_that_of_their_workload(bnsd: dict[str, Any], tmp_path: Path) -> None:
    def ran(tensors: Any, **more: Any) -> tuple[str, str]:
        result = run("flash", tensors=tensors, numerics=False, trace_groups=(), **more)
        return result.workload, result.name

    np.savez(tmp_path / "mine.npz", **bnsd)
    assert ran(tmp_path / "mine.npz") == ("mine", f"flash-mine-{TOKENS}")
    assert ran(bnsd) == ("tensors", f"flash-tensors-{TOKENS}")
    file = "smollm2_layer18_group.safetensors"  # a group of SmolLM2's heads
    assert ran(file, workload="smollm2") == ("smollm2", "flash-smollm2-1024")
    for other in ("qwen2_7b", "pangu_38b"):
        with pytest.raises(
            TensorError, match=f"3 query heads of 64 and 1 of keys do not match workload {other}, which"
        ):
            ran(file, workload=other)


@pytest.mark.parametrize("layout", ["bnsd", "bsnd", "bsh", "tnd"])
def test_every_layout_is_read_as_the_same_tensors(
    layout: Any, bnsd: dict[str, np.ndarray[Any, Any]], tmp_path: Path
) -> None:
    file = tmp_path / "qkv.npz"
    np.savez(file, **arranged(bnsd, layout))
    found = load_tensors(file, layout=layout, head_dim=SIZE)
    for name, values in bnsd.items():
        np.testing.assert_array_equal(found[name], values)


@pytest.mark.parametrize("layout", ["bsnd", "tnd"])
def test_a_run_gives_the_same_bits_and_interleaved_heads_take_longer(
    layout: Any, bnsd: dict[str, np.ndarray[Any, Any]]
) -> None:
    plain, mixed = (
        run("flash", tensors=arranged(bnsd, name), layout=name, rows="all", trace_groups=())
        for name in ("bnsd", layout)
    )
    np.testing.assert_array_equal(plain.output, mixed.output)
    # Every row of Q, K and V is a jump of its own (burst_overhead_cycles of the device file).
    assert mixed.cycles > plain.cycles


def test_bsh_takes_the_workloads_head_size() -> None:
    rng = np.random.default_rng(1)
    tensors = {n: rng.standard_normal((1, 64, 256)).astype(np.float16) for n in ("q", "k", "v")}
    result = run("flash", workload="pangu_38b", tensors=tensors, layout="bsh", trace_groups=())
    assert result.output.shape == (1, 2, 64, 128)


def test_packed_tokens_without_ends_are_one_sequence() -> None:
    tensors = {n: np.ones((40, 2, 16), np.float16) for n in ("q", "k", "v")}
    assert load_tensors(tensors, layout="tnd")["q"].shape == (1, 2, 40, 16)


def test_queries_and_keys_may_be_packed_differently() -> None:
    tensors: dict[str, Any] = {"q": np.ones((4, 2, 16), np.float16)}
    tensors |= {n: np.ones((64, 2, 16), np.float16) for n in ("k", "v")}
    tensors |= {"cu_seqlens_q": [0, 2, 4], "cu_seqlens_k": [32, 64]}
    found = load_tensors(tensors, layout="tnd")
    assert found["q"].shape == (2, 2, 2, 16)
    assert found["k"].shape == found["v"].shape == (2, 2, 32, 16)


@pytest.mark.parametrize(
    ("shape", "fields", "message"),
    [
        ((8, 2, 16), {}, r"q has shape \(8, 2, 16\); layout bnsd has 4 axes \(batch, heads, "),
        ((1, 8, 2, 16), {"layout": "tnd"}, "layout tnd has 3 axes"),
        ((1, 8, 100), {"layout": "bsh", "head_dim": 32}, "q has 100 columns; .* divides them: 32, the"),
        ((1, 8, 96), {"layout": "bsh"}, "needs a head size that divides them: none is known"),
        ((1, 1, 8, 16), {"layout": "sbh"}, "layout 'sbh'; allowed: bnsd, bsnd, bsh, tnd"),
    ],
)
def test_shapes_that_a_layout_does_not_have_are_refused(
    shape: tuple[int, ...], fields: dict[str, Any], message: str
) -> None:
    tensors = {n: np.ones(shape, np.float16) for n in ("q", "k", "v")}
    with pytest.raises(TensorError, match=message):
        load_tensors(tensors, **fields)


@pytest.mark.parametrize("ends", [[0, 16], [0, 0, 40], [0, 20, 10]])
def test_ends_that_do_not_cover_all_tokens_are_refused_with_their_lengths(ends: list[int]) -> None:
    tensors: dict[str, Any] = {n: np.ones((40, 2, 16), np.float16) for n in ("q", "k", "v")}
    with pytest.raises(TensorError, match="each must have at least one, and together they must be all tokens"):
        load_tensors({**tensors, "cu_seqlens": ends}, layout="tnd")


# ---------------------------------------------------------------- a bias, and keys that nothing reads


def _drawn_call(dtype: Any = np.float16) -> tuple[dict[str, Any], Any]:
    rng = np.random.default_rng(53)
    shapes = {"q": (1, 4, 96, 64), "k": (1, 2, 96, 64), "v": (1, 2, 96, 64)}
    return {n: rng.standard_normal(s).astype(dtype) for n, s in shapes.items()}, rng


@pytest.mark.parametrize("heads", [4, 1])
@pytest.mark.parametrize(
    ("schedule", "hw", "tiling"),
    [("flash", "ascend_910b2", {}), ("flash", "h200", {}), ("split_kv", "h200", {"pack": "on", "block_q": 192})],
)
def test_a_bias_among_the_tensors_is_added_to_scores(
    schedule: str, hw: str, tiling: dict[str, Any], heads: int
) -> None:
    tensors, rng = _drawn_call()
    bias = (3 * rng.standard_normal((heads, 96, 96))).astype(np.float16)
    result = run(schedule, hw=hw, tensors={**tensors, "bias": bias}, rows="all", heads="all", tiling=tiling)
    q, k, v = (x[0].astype(np.float64) for x in tensors.values())
    scores = np.einsum("hqd,hkd->hqk", q, np.repeat(k, 2, 0)) / 8 + bias.astype(np.float64)
    weights = np.exp(np.where(np.tril(np.ones((96, 96), bool)), scores, -np.inf))
    expected = weights / weights.sum(-1, keepdims=True) @ np.repeat(v, 2, 0)
    error = np.linalg.norm(result.output[0].astype(np.float64) - expected) / np.linalg.norm(expected)
    assert error < 5e-4
    assert result.numerics is not None
    assert result.numerics.error.rmse == pytest.approx(error, rel=1e-6)
    assert result.inputs == "arrays given"


@pytest.mark.parametrize("schedule", ["flash", "split_kv"])
@pytest.mark.parametrize("queries", [(96, 40), (8, 3)])
def test_rows_of_a_bias_are_those_of_the_queries_of_each_sequence(schedule: str, queries: tuple[int, int]) -> None:
    rng, keys = np.random.default_rng(3), (96, 40)
    sizes = {"q": (sum(queries), 4), "k": (sum(keys), 2), "v": (sum(keys), 2)}
    tensors = {n: rng.standard_normal((*size, 64)).astype(np.float16) for n, size in sizes.items()}
    ends = {"cu_seqlens_q": np.cumsum((0, *queries)), "cu_seqlens_k": np.cumsum((0, *keys))}
    bias = (3 * rng.standard_normal((4, max(queries), 96))).astype(np.float16)
    given = {**tensors, **ends, "bias": bias}
    result = run(schedule, hw="h200", tensors=given, layout="tnd", rows="all", heads="all")
    q, k, v = (x[-n:].astype(np.float64) for x, n in zip(tensors.values(), (queries[1], keys[1], keys[1]), strict=True))
    added = bias[:, : queries[1], : keys[1]].astype(np.float64)
    scores = np.einsum("qhd,khd->hqk", q, np.repeat(k, 2, 1)) / 8 + added
    visible = np.tril(np.ones(scores.shape[1:], bool), keys[1] - queries[1])
    weights = np.exp(np.where(visible, scores, -np.inf))
    expected = np.einsum("hqk,khd->hqd", weights / weights.sum(-1, keepdims=True), np.repeat(v, 2, 1))
    assert np.linalg.norm(result.output[1][:, : queries[1]] - expected) < 5e-4 * np.linalg.norm(expected)
    assert result.numerics is not None
    assert result.numerics.error.rmse < 5e-4


def test_what_is_drawn_beside_tensors_is_named() -> None:
    tensors, _ = _drawn_call()
    assert run("flash", tensors=tensors, bias="head").inputs == "arrays given; drawn: bias"
    assert run("flash", workload="smollm2", seq=64, page=16).inputs.endswith("; drawn: pages")


@pytest.mark.parametrize(
    ("more", "options", "why"),
    [
        ({"bais": np.zeros(1)}, {}, "not read key 'bais'. Did you mean `bias`"),
        ({"cu_seqlens": np.array([96])}, {}, "npusim does not read key 'cu_seqlens'"),
        (
            {"bias": np.zeros((4, 96, 96), np.float32)},
            {},
            r"bias is \(4, 96, 96\) float32; .*\(4 or 1, 96, 96\) float16",
        ),
        (
            {"bias": np.zeros((2, 96, 96), np.float16)},
            {},
            r"bias is \(2, 96, 96\) float16; must be \(query heads, queries, keys\):",
        ),
        (
            {"bias": np.zeros((4, 96, 96), np.float16)},
            {"bias": "shared"},
            r"bias: shared, but the tensors have a bias of",
        ),
        (
            {"bias": np.full((1, 96, 96), 600, np.float16)},
            {"hw": "h200", "dtype": "float8_e4m3fn"},
            r"9216 values of bias are beyond float8_e4m3fn's largest, 448; the first is 600.0 at \(0, 0, 0\)",
        ),
    ],
)
def test_tensors_that_nothing_reads_are_refused(more: dict[str, Any], options: dict[str, Any], why: str) -> None:
    with pytest.raises(TensorError, match=why):
        run("flash", tensors={**_drawn_call()[0], **more}, **options)


def test_keys_that_no_query_sees_may_be_nan_and_the_run_says_what_they_reach() -> None:
    """P is 0 there, and 0 NaN is NaN: a tile with such a key poisons its rows, one that is not visited none."""
    rng = np.random.default_rng(3)
    tensors = {n: rng.normal(size=(1, 1, rows, 16)).astype(np.float16) for n, rows in (("q", 1), ("k", 96), ("v", 96))}
    asked: dict[str, Any] = {
        "causal": True,
        "trace_groups": (),
        "hw": "ascend_910b2",
        "rows": "all",
        "window": 16,
        "tiling": {"block_kv": 32},
    }
    clean = run("flash", tensors=tensors, **asked)
    far, near = ({n: x.copy() for n, x in tensors.items()} for _ in range(2))
    far["k"][0, 0, 60], far["v"][0, 0, 63] = np.nan, np.inf  # before the one tile that is visited
    near["v"][0, 0, 70] = np.nan  # in it, and masked
    assert np.array_equal(run("flash", tensors=far, **asked).output, clean.output)
    poisoned = run("flash", tensors=near, **asked)
    assert np.isnan(poisoned.output).all()
    assert poisoned.numerics is not None
    assert poisoned.numerics.error.nan_count == 16
    seen = {n: x.copy() for n, x in tensors.items()}
    seen["v"][0, 0, 90, 3] = np.nan
    with pytest.raises(TensorError, match=r"tensors: v has 1 NaN, the first at \(0, 0, 90, 3\), which a query sees"):
        run("flash", tensors=seen, **asked)
    filled = run("flash", tensors=tensors, padding="nan", **asked).notes
    reaches = "that no query sees reaches"
    first = "1 of 1 rows of the output, first batch 0 head 0 row 0"
    assert f"padding: NaN in the 80 of 96 keys {reaches} {first}" in filled
    ends = run("flash", tensors=tensors, padding="nan", **{**asked, "window": 32})
    assert f"padding: NaN in the 64 of 96 keys {reaches} none of 1 rows of the output" in ends.notes
    lengths = run("flash", workload="smollm2", lengths=(40, 61), padding="nan", seq_q=2, hw="h200")
    assert any(n.endswith("; no tile reads the 21 keys beyond lengths") for n in lengths.notes)


def test_nan_in_a_bias_says_nothing_of_keys() -> None:
    tensors = {n: np.ones((1, 1, 64, 64), np.float16) for n in "qkv"}
    bias = np.zeros((1, 64, 64), np.float16)
    bias[0, 3, 4] = np.nan
    with pytest.raises(TensorError, match=r"bias has 1 NaN, the first at \(0, 3, 4\)$"):
        run("flash", tensors={**tensors, "bias": bias}, bias="shared", causal=False)


def test_query_key_and_value_are_names_of_the_tensors() -> None:
    rng = np.random.default_rng(0)
    short = {n: rng.standard_normal((1, 2, 16, 16)).astype(np.float16) for n in "qkv"}
    named = dict(zip(("layer.query", "layer.key", "layer.value"), short.values(), strict=True))
    assert all(np.array_equal(load_tensors(short)[n], load_tensors(named)[n]) for n in "qkv")
    with pytest.raises(TensorError, match="'q' and 'query' for the same tensor;"):
        load_tensors({**short, "query": short["q"]})
