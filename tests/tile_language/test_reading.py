"""TileLang programs: recorded, run on NPUs and GPUs, and held against float64; needs the package."""

from __future__ import annotations

import re
from importlib.util import find_spec
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import npusim
from npusim.errors import NpusimError, SpecError

if TYPE_CHECKING:
    from npusim.kernels.triton.calls import Call, CallConfiguration

pytestmark = pytest.mark.skipif(find_spec("tilelang") is None, reason="TileLang is not installed: npusim[tilelang]")
DEVICES = ("ascend_910b2", "ascend_950", "h200", "a10")
#: Relative RMSE of results in 16 bits.
CLOSE = 4e-4


def recorded(function: Any, *arguments: Any) -> Call:
    """Return the call of one launch, with the values of its tensors."""
    with npusim.record(floats=True) as calls:
        function(*arguments)
    (call,) = calls
    return call


def error(call: Call, hw: str, output: str, wanted: Any) -> float:
    """Return the relative RMSE of a run's result against an array, all elements."""
    from ttir.stored import stored

    result = npusim.run(call, hw=hw, rows="all")
    made = stored(result, {n: x.data for n, x in call.tensors.items()})[output]
    return float(np.sqrt(((made - wanted) ** 2).mean() / (wanted**2).mean()))


@pytest.mark.parametrize("hw", DEVICES)
def test_a_product_has_its_bits(hw: str) -> None:
    from tests.tile_language.tile_kernels import drawn, matmul

    a, b = drawn((128, 80), (192, 80))  # 80 is no multiple of the tile's 32
    call = recorded(lambda: matmul(128, 192, 80)(a, b))
    wanted = a.numpy().astype(np.float64) @ b.numpy().astype(np.float64).T
    assert error(call, hw, "C", wanted) < CLOSE


@pytest.mark.parametrize("hw", DEVICES)
@pytest.mark.parametrize(("groups", "causal"), [(1, False), (1, True), (2, True)])
def test_attention_has_its_bits(hw: str, groups: int, causal: bool) -> None:
    from tests.tile_language.tile_kernels import attention_in_float64, drawn, flash

    q, k, v = drawn((128, 2, 64), (128, 2 // groups, 64), (128, 2 // groups, 64))
    call = recorded(lambda: flash(2, groups, 128, 64, causal)(q, k, v))
    wanted = attention_in_float64(q.numpy(), k.numpy(), v.numpy(), causal=causal)
    assert error(call, hw, "O", wanted) < CLOSE


def test_a_bound_value_is_that_of_its_line() -> None:
    from tests.tile_language.tile_kernels import drawn, late_read, torch

    (x,) = drawn((32, 64), dtype=torch.float32)
    call = recorded(lambda: late_read(32, 64)(x))
    assert error(call, "ascend_910b2", "Y", 3.0 * x.numpy().astype(np.float64)) < 1e-6


def test_sizes_are_those_of_the_launch() -> None:
    from tests.tile_language.tile_kernels import added, drawn, torch

    a, b, c = drawn((40, 100), (40, 100), (40, 100), dtype=torch.float32)
    call = recorded(lambda: added(a, b, c))
    assert call.grid == (2, 3, 1)
    assert error(call, "h200", "C", a.numpy().astype(np.float64) + b.numpy()) < 1e-6


def test_a_short_loop_in_parallel_loops_is_its_iterations() -> None:
    from tests.tile_language.tile_kernels import drawn, mixed, torch

    a, b = drawn((4, 4), (4, 64), dtype=torch.float32)
    call = recorded(lambda: mixed(4, 64)(a, b))
    wanted = a.numpy().astype(np.float64).T @ b.numpy().astype(np.float64)
    assert error(call, "h200", "Y", wanted) < 1e-6
    with npusim.record() as calls:
        mixed(32, 64)(*drawn((32, 32), (32, 64), dtype=torch.float32))
    assert "a T.Parallel nest contains a loop of 32 iterations; allowed: 16" in calls[0].configurations[0].refused


@pytest.mark.parametrize(("group", "starts"), [(1, [0, 40, 97]), (8, [0, 32, 96])])
def test_masks_of_lengths_and_of_groups_hide_what_they_say(group: int, starts: list[int]) -> None:
    from tests.tile_language.tile_kernels import drawn, padded_flash, torch

    length = starts[-1]
    q, k = drawn((length, 2, 64), (length, 2, 64))
    call = recorded(lambda: padded_flash(2, length, 64, group)(q, k, torch.tensor(starts, dtype=torch.int32)))
    wanted = np.zeros((length, 2, 64))
    for first, end in pairwise(starts):
        x, y = (z.numpy().astype(np.float64)[first:end] for z in (q, k))
        at = np.arange(end - first)
        scores = np.einsum("ihd,jhd->hij", x, y) / 8
        scores = np.where(at[:, None] // group >= at[None] // group, scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        wanted[first:end] = np.einsum("hij,jhd->ihd", weights / weights.sum(-1, keepdims=True), y)
    assert error(call, "h200", "O", wanted) < CLOSE


def test_a_tile_that_nothing_has_written_is_refused_at_its_line() -> None:
    from tests.tile_language.tile_kernels import drawn, no_start, torch

    (x,) = drawn((32, 64), dtype=torch.float32)
    call = recorded(lambda: no_start(32, 64)(x))
    with pytest.raises(SpecError, match=r"tile_kernels\.py:\d+: y(_frag)? is read before it is written"):
        npusim.run(call, hw="h200")


def test_configurations_of_a_tuner_are_one_call_and_chosen_ones_are_not_tuned() -> None:
    from tests.tile_language.tile_kernels import doubled, drawn

    (x,) = drawn((64, 32))
    with npusim.record() as calls:
        doubled(64, 32)(x)
        doubled(64, 32, tile=16)(x)
    tuned, chosen = calls
    assert [dict(c.constants) for c in tuned.configurations] == [
        {"tile": tile, "stages": stages} for tile in (32, 64) for stages in (1, 2)
    ]
    assert [c.grid for c in tuned.configurations] == [(2, 1, 1), (2, 1, 1), (1, 1, 1), (1, 1, 1)]
    assert len(chosen.configurations) == 1
    assert chosen.grid == (4, 1, 1)


def test_a_launch_on_a_format_that_is_not_read_is_listed() -> None:
    from tests.tile_language.tile_kernels import drawn, matmul, scales, torch

    with npusim.record() as calls:
        made = scales(128)(torch.zeros(128, dtype=torch.uint8).view(torch.float8_e8m0fnu))
        matmul(64, 64, 64)(*drawn((64, 64), (64, 64)))
    assert made.shape == (128,)
    assert [bool(c.configurations[0].refused) for c in calls] == [True, False]
    assert "the format float8_e8m0fnu" in calls[0].configurations[0].refused


def test_two_launches_of_a_function_are_two_calls() -> None:
    from tests.tile_language.tile_kernels import drawn, in_two, torch

    (a,) = drawn((32, 64), dtype=torch.float32)
    with npusim.record(floats=True) as calls:
        in_two(32, 64)(a)
    first, second = calls
    assert first.tensors["between"].storage == second.tensors["between"].storage
    assert error(first, "ascend_910b2", "between", 2.0 * a.numpy().astype(np.float64)) < 1e-6


def test_what_changes_the_time_alone_is_named() -> None:
    from tests.tile_language.tile_kernels import drawn, matmul

    a, b = drawn((64, 64), (64, 64))
    with npusim.record() as calls:
        matmul(64, 64, 64)(a, b)
        matmul(64, 64, 64, swizzle=True)(a, b)
    plain, swizzled = ([n.partition(": ")[2] for n in c.configurations[0].notes] for c in calls)
    assert plain == ["the policy of T.gemm changes only the time; npusim ignores it"]
    assert swizzled[0] == "the order of blocks (T.use_swizzle) changes only the time; npusim ignores it"


@pytest.mark.parametrize(("hides", "hw"), [(False, "h200"), (True, "h200"), (False, "ascend_910b2")])
def test_an_if_of_each_iteration_chooses_tiles_and_what_a_mask_hides(hides: bool, hw: str) -> None:
    from tests.tile_language.tile_kernels import attended_in_float64, copied_by_an_if, drawn, torch

    q, k, v = drawn((128, 64), (256, 64), (256, 64))
    (b,) = drawn((128,), dtype=torch.float32)
    call = recorded(lambda: copied_by_an_if(128, 64, hides=hides)(q, k, v, b))
    wanted = attended_in_float64(*(x.numpy().astype(np.float64) for x in (q, k, v, b)))
    assert error(call, hw, "O", wanted) < CLOSE


def test_results_of_unlike_shapes_behind_a_bound_are_kernels_of_their_own() -> None:
    from tests.tile_language.tile_kernels import drawn, torch, two_results_behind_a_bound

    (x,) = drawn((64, 32), dtype=torch.float32)
    call = recorded(lambda: two_results_behind_a_bound(64, 32, 6)(x, torch.zeros(64, 16), torch.zeros(64, 32)))
    assert error(call, "h200", "Y", 2.0 * x.numpy()[:, :16]) == 0
    assert error(call, "h200", "Z", x.numpy() + np.float32(1.0)) == 0


def test_elements_below_a_tensor_are_masked_under_a_name_too() -> None:
    """Elements below and beyond a tensor are 0, also where a tensor decides which elements these are."""
    from ttir.stored import stored

    from tests.tile_language.tile_kernels import chunk_before, moved_by_a_tensor, torch

    x = torch.rand(3, 64, 32)
    before = recorded(lambda: chunk_before(4)(x, torch.zeros(2, 64, 32)))
    done = npusim.run(before, hw="h200", rows="all")
    made = stored(done, {n: a.data for n, a in before.tensors.items()})["B"]
    assert not made[:, :16].any()
    assert np.array_equal(made[:, 16:], x.numpy()[1:, :48])
    by, a = torch.full((4,), -3, dtype=torch.int32), torch.rand(5, 64)
    moved = recorded(lambda: moved_by_a_tensor(64)(by, a, torch.zeros(4, 64)))
    wanted = np.pad(a.numpy()[1:, :61], ((0, 0), (3, 0)))
    assert error(moved, "h200", "B", wanted) == 0
    by[1] = 2
    moved = recorded(lambda: moved_by_a_tensor(64)(by, a, torch.zeros(4, 64)))
    wanted[1] = np.pad(a.numpy()[2, 2:], (0, 2))
    assert error(moved, "h200", "B", wanted) == 0


@pytest.mark.parametrize("is_global", [False, True])
def test_a_view_is_refused_at_its_line(is_global: bool) -> None:
    from tests.tile_language.tile_kernels import through_a_view, torch

    call = recorded(lambda: through_a_view(is_global)(torch.rand(64), torch.zeros(64)))
    assert f"view, a view (T.reshape, T.view) of {'B' if is_global else 'x'}" in call.configurations[0].refused
    assert "tile_kernels.py:" in call.configurations[0].refused


def configuration_of_each(function: str) -> CallConfiguration:
    from tests.tile_language.tile_kernels import of_each, torch

    return recorded(lambda: of_each(function)(torch.rand(64), torch.zeros(64))).configurations[0]


def test_an_approximate_reciprocal_is_refused_at_its_line() -> None:
    assert re.search(r"tile_kernels\.py:\d+: T\.fast_rcp, an approximate", configuration_of_each("fast_rcp").refused)


@pytest.mark.parametrize("function", ["exp", "log", "log2"])
def test_an_approximate_function_is_named_at_its_line(function: str) -> None:
    said = re.compile(rf"tile_kernels\.py:\d+: T\.__{function} is an approximate function on a GPU")
    assert any(map(said.search, configuration_of_each(f"__{function}").notes))
    assert not any(map(said.search, configuration_of_each(function).notes))


def test_arguments_by_name_are_those_of_the_parameters() -> None:
    from tests.tile_language.tile_kernels import difference, torch

    a, b, c = torch.rand(64), torch.rand(64), torch.zeros(64)
    call = recorded(lambda: difference()(a, C=c, B=b))
    assert error(call, "h200", "C", (a - b).numpy()) < 1e-6
    with pytest.raises(SpecError, match="kernel: D cannot be passed by name; allowed: C"):
        recorded(lambda: difference()(a, b, D=c))


@pytest.mark.parametrize("sums", [False, True])
def test_a_layout_decides_the_order_of_sums(sums: bool) -> None:
    from tests.tile_language.tile_kernels import sum_and_product, torch

    a = torch.rand(64, 64).half()
    notes = " ".join(recorded(lambda: sum_and_product("float16", sums)(a, torch.zeros(64))).configurations[0].notes)
    policy = "the policy of T.gemm changes"
    assert f"{policy} {'the time, and the order of sums on a GPU' if sums else 'only the time'}; npusim" in notes
    assert ("the order of additions in T.reduce_sum and T.cumsum is assumed" in notes) == sums


@pytest.mark.parametrize("fmt", ["float16", "float8_e4m3fn"])
def test_the_instruction_of_a_product_in_8_bits_may_change_its_bits(fmt: str) -> None:
    from tests.tile_language.tile_kernels import sum_and_product, tilelang, torch

    program = sum_and_product.get_tir(fmt, False)
    options = {"pass_configs": {"tl.disable_wgmma": True}}
    a = torch.rand(64, 64).to(getattr(torch, fmt))
    call = recorded(lambda: tilelang.compile(program, **options)(a, torch.zeros(64)))
    notes = " ".join(call.configurations[0].notes)
    is_short = fmt.startswith("float8")
    for name in ("tl.disable_wgmma", "prefer_instruction"):
        assert (f"{name} may change the bits of 8-bit products" in notes) == is_short


@pytest.mark.parametrize("function", ["exp", "a division"])
def test_functions_of_a_library_are_named(function: str) -> None:
    notes = configuration_of_each(function).notes
    assert sum("nvcc's functions (expf, logf)" in n for n in notes) == 1
    assert not any("expf" in n for n in configuration_of_each("abs").notes)


@pytest.mark.parametrize(("kind", "hw"), [("part", "h200"), ("elements", "h200"), ("neighbours", "a10")])
def test_atomic_additions_are_sums_of_parts(kind: str, hw: str) -> None:
    from tests.tile_language.tile_kernels import drawn, split_product, torch

    a, b = drawn((32, 128), (128, 64))
    call = recorded(lambda: split_product(32, 64, 128, 2, kind)(a, b, torch.zeros(32, 64)))
    assert error(call, hw, "C", a.numpy().astype(np.float64) @ b.numpy().astype(np.float64)) < 1e-6


def test_an_addition_of_a_loop_to_one_place_is_refused() -> None:
    from tests.tile_language.tile_kernels import added_rows, drawn, torch

    (a,) = drawn((32, 64), dtype=torch.float32)
    call = recorded(lambda: added_rows(32, 64)(a, torch.zeros(64)))
    with pytest.raises(NpusimError, match=r"tile_kernels\.py:\d+: a loop for which C has no axis"):
        npusim.run(call, hw="h200")


@pytest.mark.parametrize(("slots", "hw"), [(1, "h200"), (2, "h200"), (3, "ascend_910b2")])
def test_warp_groups_with_barriers_have_the_bits_of_their_text(slots: int, hw: str) -> None:
    from tests.tile_language.tile_kernels import drawn, product_of_warp_groups, torch

    a, b = drawn((32, 192), (192, 64))
    call = recorded(lambda: product_of_warp_groups(32, 64, 192, slots)(a, b, torch.zeros(32, 64)))
    assert error(call, hw, "C", a.numpy().astype(np.float64) @ b.numpy().astype(np.float64)) < 1e-6
    assert any("warp groups (T.ws): " in n for n in call.configurations[0].notes)


def test_warp_groups_that_do_not_wait_are_refused() -> None:
    from tests.tile_language.tile_kernels import drawn, product_of_warp_groups, torch

    a, b = drawn((32, 192), (192, 64))
    call = recorded(lambda: product_of_warp_groups(32, 64, 192, 2, False)(a, b, torch.zeros(32, 64)))
    with pytest.raises(
        NpusimError, match=r"tile_kernels\.py:\d+: a copy may count for the previous phase of its barrier"
    ):
        npusim.run(call, hw="h200")


def test_events_of_a_tracer_have_no_values_and_a_note() -> None:
    from tests.tile_language.tile_kernels import torch, with_events

    a = torch.rand(128)
    call = recorded(lambda: with_events(128)(a, torch.zeros(128)))
    assert error(call, "h200", "C", (a + 1.0).numpy()) == 0
    assert any("events of tilelang.tools.cuda.iket take time on a GPU" in n for n in call.configurations[0].notes)


@pytest.mark.parametrize("hw", ["h200", "ascend_910b2"])
def test_a_tile_that_is_accessed_in_two_parts_is_two_tiles(hw: str) -> None:
    from tests.tile_language.tile_kernels import drawn, product_of_two_parts, torch

    a, b, c = drawn((64, 48), (64, 32), (64, 16))
    call = recorded(lambda: product_of_two_parts(64, 64, 32, 16)(a, b, c, torch.zeros(64, 64)))
    right = np.concatenate([b.numpy(), c.numpy()], 1).astype(np.float64)
    assert error(call, hw, "C", 2.0 * a.numpy().astype(np.float64) @ right.T) < 1e-6


def test_a_variable_of_bool_that_a_loop_sets_decides_behind_it() -> None:
    from tests.tile_language.tile_kernels import drawn, sum_of_chosen_blocks, torch

    p, v = drawn((96, 128), (128, 64))
    w = torch.rand(96, 128) + 0.5
    chosen = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0], [0, 1, 1, 1]], dtype=torch.bool)
    call = recorded(lambda: sum_of_chosen_blocks(96, 128, 64)(p, v, w, chosen, torch.zeros(96, 64)))
    kept = np.repeat(np.repeat(chosen.numpy(), 32, 0), 32, 1)
    sums = (p.numpy() * kept).astype(np.float64) @ v.numpy().astype(np.float64)
    wanted = sums / np.maximum((w.numpy() * kept).sum(1, keepdims=True), 1e-9)
    assert error(call, "h200", "O", wanted) < CLOSE


def test_maxima_along_an_axis_of_splits_weight_a_sum() -> None:
    from tests.tile_language.tile_kernels import combined_splits, drawn, torch

    lse, parts = drawn((4, 64), (64, 4, 32), dtype=torch.float32)
    call = recorded(lambda: combined_splits(64, 4, 32)(lse, parts, torch.zeros(64, 32)))
    weights = np.exp2(lse.numpy().astype(np.float64) - lse.numpy().max(0))
    assert error(call, "h200", "O", np.einsum("kr,rkd->rd", weights, parts.numpy())) < 1e-6
    again = "a part of the tile every is loaded and computed again from tensors, and the time includes this"
    assert any(again in n for n in call.configurations[0].notes)


def test_iterations_of_persistent_programs_are_programs() -> None:
    from tests.tile_language.tile_kernels import drawn, persistent_product, torch

    a, b = drawn((96, 64), (64, 128))
    call = recorded(lambda: persistent_product(96, 128, 64, 5)(a, b, torch.zeros(96, 128)))
    assert error(call, "h200", "C", a.numpy().astype(np.float64) @ b.numpy().astype(np.float64)) < 1e-6
    assert any("T.Persistent: the time is that of a grid" in n for n in call.configurations[0].notes)


def test_both_ways_of_an_if_in_parallel_loops_write_a_new_tile() -> None:
    from tests.tile_language.tile_kernels import filled_below, torch

    a, b = torch.rand(64, 32), torch.rand(64, 32)
    call = recorded(lambda: filled_below(64, 32, 40)(a, b, torch.zeros(64, 32)))
    wanted = np.where(np.arange(64)[:, None] < 40, a.numpy(), 2.0 * b.numpy())
    assert error(call, "h200", "C", wanted) == 0


def test_an_if_masks_the_first_tile_by_a_number_of_a_tensor() -> None:
    from tests.tile_language.tile_kernels import drawn, masked_first_tile, torch

    q, k = drawn((96, 64), (96, 64))
    ends = torch.tensor([5, 32, 17], dtype=torch.int32)
    call = recorded(lambda: masked_first_tile(96, 64)(q, k, ends, torch.zeros(96)))
    scores = q.numpy().astype(np.float64) @ k.numpy().astype(np.float64).T
    keys = np.arange(96)[None]
    is_hidden = (keys < 32) & (keys >= np.repeat(ends.numpy(), 32)[:, None])
    assert error(call, "h200", "O", np.where(is_hidden, 0, np.exp2(scores * 0.125)).sum(1)) < 1e-5


@pytest.mark.parametrize("hw", ["h200", "ascend_910b2"])
def test_bits_of_floats_are_integers_and_back(hw: str) -> None:
    from tests.tile_language.tile_kernels import powers_above, torch

    a = torch.randn(64, 48, generator=torch.Generator().manual_seed(0))
    call = recorded(lambda: powers_above(64, 48)(a, torch.zeros(64, 48)))
    wanted = -np.sign(a.numpy()) * np.exp2(np.frexp(a.numpy())[1])
    assert error(call, hw, "C", wanted) == 0.0
