"""Kernels as compilers of graphs and serving engines write them: results beside float64, on an NPU and a GPU."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest

import npusim
from npusim.errors import ProgramError, SpecError
from tests.turns import every, in_turn

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: npusim[triton]"),
    pytest.mark.usefixtures("without_warp_code"),
]
DEVICES = ("ascend_910b2", "h200")
#: Relative RMSE of results by format: rounding, of sums in another order.
CLOSE = {"float32": 1e-6, "float16": 6e-4}


class Launch(NamedTuple):
    """A launch: kernel, grid, arguments by parameter, the tensor that it stores, and that tensor in float64."""

    kernel: str
    grid: tuple[int, ...]
    words: dict[str, Any]
    result: str
    wanted: Any


def normal(seed: int, *shape: int, fmt: str = "float32") -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(fmt)


def check(launch: Launch, hw: str, close: float = 0.0) -> Any:
    """Run a launch on a device; every element is stored, near its value in float64 (``close``: relative RMSE)."""
    from ttir import engine_kernels, loaded_kernels
    from ttir.stored import stored

    kernel = getattr(engine_kernels, launch.kernel, None) or getattr(loaded_kernels, launch.kernel)
    with npusim.record(floats=True) as calls:
        kernel[launch.grid](**launch.words)
    done = npusim.run(calls[0], hw=hw, rows="all")
    made, wanted = stored(done, launch.words)[launch.result], np.asarray(launch.wanted, np.float64)
    is_number = np.isfinite(wanted)
    assert np.array_equal(np.isfinite(made), is_number)
    assert np.array_equal(made[~is_number], wanted[~is_number], equal_nan=True)
    error = np.sqrt(((made[is_number] - wanted[is_number]) ** 2).mean() / (wanted[is_number] ** 2).mean())
    assert error < (close or CLOSE[str(launch.words[launch.result].dtype)])
    assert done.latency_us > 0
    return done


def looped() -> Iterator[tuple[str, Launch]]:
    x, w = normal(0, 5, 300), normal(1, 300)
    wide = x.astype(np.float64)
    sums = {
        "squares": (wide**2).sum(1),
        "shifted": (wide + 1).sum(1),
        "products": ((wide + 1) * (wide + 2)).sum(1),
        "max": wide.max(1),
    }
    normed = wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-5) * w
    for block, grid in ((1, 5), (4, 2)):
        sizes = {"X": x, "rows": 5, "n": 300, "XBLOCK": block, "RBLOCK": 64}
        for how, wanted in sums.items():
            words = {**sizes, "Y": np.zeros(5, np.float32), "HOW": how}
            yield f"{how} of {block}", Launch("looped_sum", (grid,), words, "Y", wanted)
        words = {**sizes, "W": w, "Y": np.zeros_like(x)}
        yield f"norm of {block}", Launch("looped_norm", (grid,), words, "Y", normed)


def flat() -> Iterator[tuple[str, Launch]]:
    x, part, moved, turned = normal(0, 12, 64), normal(1, 12, 128), normal(2, 3, 4, 64), normal(3, 64, 12)
    columns, rows = normal(4, 64), normal(5, 12)
    wide = x.astype(np.float64)
    for block in (32, 256, 512, 1024):
        sizes = {"count": 768, "B": block, "INNER": 64, "OUTER": 3}
        for how, given, vector, wanted in (
            ("bias", x, columns, wide + columns),
            ("bias", x.ravel(), columns, (wide + columns).ravel()),
            ("scale", x, rows, wide * rows[:, None]),
            ("part", part, rows, part[:, :64].astype(np.float64) * part[:, 64:]),
            ("permuted", moved, rows, moved.transpose(1, 0, 2)),
            ("transposed", turned, rows, turned.T),
        ):
            words = {"X": given, "W": vector, "Y": np.zeros(wanted.shape, np.float32), **sizes, "HOW": how}
            name = f"{how} of {given.ndim} axes by {block}"
            yield name, Launch("flat", (-(-768 // block),), words, "Y", wanted)


def searched() -> Iterator[tuple[str, Launch]]:
    starts, x = np.array([0, 4, 5, 9, 12], np.int32), normal(0, 12, 40)
    rows = np.arange(12)
    wanted = 2.0 * x[rows - starts[np.searchsorted(starts, rows, side="right") - 1]]
    for how in ("while", "for"):
        words = {"X": x, "Starts": starts, "Y": np.zeros_like(x), "count": 5, "n": 40, "B": 64, "HOW": how}
        yield how, Launch("searched", (12,), words, "Y", wanted)


def scans_and_constants() -> Iterator[tuple[str, Launch]]:
    x = normal(0, 6, 40)
    wide = x.astype(np.float64)
    sizes = {"X": x, "Y": np.zeros_like(x), "n": 40, "B": 64}
    sums = np.cumsum(wide, 1)
    yield "sums of a row", Launch("scanned", (6,), {**sizes, "HOW": "forward"}, "Y", sums)
    yield "sums of a tile", Launch("scanned_tile", (2,), {**sizes, "M": 6, "BM": 4}, "Y", sums)
    for how, wanted in {"rsqrt": wide / 8, "exp": wide * np.exp(-8), "log": wide + np.log(64)}.items():
        yield f"{how} of a number", Launch("constants", (6,), {**sizes, "D": 64, "HOW": how}, "Y", wanted)
    root = 1 / np.sqrt(48)
    yield "root in a tile", Launch("constant_tile", (2,), {**sizes, "M": 6, "BM": 4, "D": 48}, "Y", wide * root + root)


def masked_keys() -> Iterator[tuple[str, Launch]]:
    size, scale = 64, 0.17
    q, k, v = (normal(seed, 2, size, 32, fmt="float16") for seed in range(3))
    row, key = np.arange(size)[:, None], np.arange(size)[None]
    seen = {
        "finite": row >= key,
        "or": (row >= key) | (key < 16),
        "window or sink": (row >= key) & ((row - key < 24) | (key < 4)),
        "not": (row >= key) & (row - key < 40),
        "xor": (row < key) ^ (key < 16),
        "guarded": row >= key,
        "number first": (row >= key) & (key < 50),
        "blocks": row // 8 >= key // 8,
        "other blocks": ((row % 8 == key % 8) | (row // 16 == key // 16)) & (key <= 60),
        "one tile": (row // 4 >= key // 4) | (key >= 32),
    }
    for how, kept in seen.items():
        scores = np.where(kept, q.astype(np.float64) @ k.astype(np.float64).transpose(0, 2, 1) * scale, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        wanted = weights @ v.astype(np.float64) / weights.sum(-1, keepdims=True)
        words = {"Q": q, "K": k, "V": v, "O": np.zeros_like(q), "Lens": np.array([size], np.int32), "S": size}
        words |= {"scale": scale, "D": 32, "BM": 32, "BN": 32, "HOW": how}
        yield how, Launch("padded_keys", (2, 2), words, "O", wanted)


def spans() -> Iterator[tuple[str, Launch]]:
    x, rows, columns = normal(0, 10, 50), normal(1, 10), normal(2, 50)
    rows[2], rows[5] = np.inf, -np.inf
    wide, r, c = (v.astype(np.float64) for v in (x, rows[:, None], columns[None]))
    with np.errstate(all="ignore"):
        wanted = {
            "row condition": np.where(r == -np.inf, -1.0, wide - r),
            "infinite": np.where(r == np.inf, 2.0, np.where(r == -np.inf, wide, wide + r)),
            "column condition": np.where(c > 0, wide, wide * c),
            "row or column": np.where((c > 0) | (r > 0), wide, c),
            "row and column": np.where(wide > 0, r, c),
            "numbers": np.where(r > 0, 1.0, 3.0) * wide,
            "maximum": np.maximum(np.minimum(wide, r), c),
            "outer": r * c,
            "outer fma": r * c + wide,
            "row fma": wide * r + c,
            "added": (r + c) - wide,
            "xor": np.where((wide > 0) ^ (r > 0), wide, c),
        }
    for how, each in wanted.items():
        words = {"X": x, "R": rows, "C": columns, "Y": np.zeros_like(x), "M": 10, "N": 50, "BM": 4, "BN": 64}
        yield how, Launch("spans", (3,), {**words, "HOW": how}, "Y", each)


def in_turns(launches: Iterator[tuple[str, Launch]], size: int, step: int = 1) -> Any:
    """Return parameters of launches and devices: each launch on one of them by default, the devices in turn.

    ``size``: launches of one group, whose turns begin with another device than those of the group before.  ``step``:
    one of so many launches runs by default; two groups, on both devices, have the same ones.
    """
    each = [pytest.param(x, id=n) for n, x in launches]
    groups = [each[at : at + size] for at in range(0, len(each), size)]
    chosen = [
        x
        for start, group in enumerate(groups)
        for x in every(step, in_turn(group, DEVICES, start=start), start // len(DEVICES) % step)
    ]
    return pytest.mark.parametrize(("launch", "hw"), chosen)


@in_turns(looped(), 5)
def test_a_mask_of_an_accumulator_masks_what_is_added(launch: Launch, hw: str) -> None:
    check(launch, hw)


@in_turns(flat(), 6, step=2)
def test_quotients_and_remainders_of_flat_indices_are_rows_and_columns(launch: Launch, hw: str) -> None:
    check(launch, hw)


def test_blocks_of_flat_indices_that_are_read_as_smaller_ones_are_said() -> None:
    launches = dict(flat())
    (said,) = [n for n in check(launches["permuted of 3 axes by 256"], "h200").notes if "flat indices" in n]
    assert "npusim treats a block of 256 flat indices as 4 blocks" in said
    assert not [n for n in check(launches["bias of 2 axes by 256"], "h200").notes if "flat indices" in n]


@in_turns(searched(), 20)
def test_a_search_among_loaded_integers_is_evaluated_by_program(launch: Launch, hw: str) -> None:
    """A parameter that the kernel binds to another variable has that one's name in TTIR, and its own here."""
    assert check(launch, hw).numerics.error.rmse < 1e-7


@in_turns(scans_and_constants(), 20)
def test_cumulative_sums_and_functions_of_numbers_are_read(launch: Launch, hw: str) -> None:
    assert check(launch, hw).numerics.error.rmse < 1e-6


@pytest.mark.parametrize("hw", DEVICES)
def test_cumulative_sums_from_the_end_are_those_of_the_row_turned_round(hw: str) -> None:
    launch = dict(scans_and_constants())["sums of a row"]
    turned = launch._replace(
        words={**launch.words, "HOW": "reverse"},
        wanted=np.cumsum(launch.words["X"].astype(np.float64)[:, ::-1], 1)[:, ::-1],
    )
    assert check(turned, hw).numerics.error.rmse < 1e-6


@in_turns(masked_keys(), 6)
def test_comparisons_of_a_mask_are_joined_by_and_or_not_and_xor(launch: Launch, hw: str) -> None:
    assert check(launch, hw).numerics.error.rmse < 1e-3


@in_turns(spans(), 20)
def test_rows_columns_and_numbers_span_a_tile(launch: Launch, hw: str) -> None:
    check(launch, hw)


@pytest.mark.parametrize("hw", DEVICES)
def test_a_branch_that_stores_and_ends_is_read_where_all_programs_answer_alike(hw: str) -> None:
    x = normal(0, 3, 40)
    words = {"X": x, "E": np.ones(3, np.int32), "Y": np.zeros_like(x), "n": 40, "B": 64}
    check(Launch("stores_or_ends", (3,), words, "Y", 2.0 * x), hw)
    words = {**words, "E": np.array([1, -1, 1], np.int32)}  # kinds of programs
    wanted = np.where(words["E"][:, None] == -1, 0.0, 2.0 * x)
    from ttir import engine_kernels
    from ttir.stored import stored

    with npusim.record(floats=True) as calls:
        engine_kernels.stores_or_ends[(3,)](**words)
    assert np.array_equal(stored(npusim.run(calls[0], hw=hw, rows="all"), words)["Y"], wanted)


@pytest.mark.parametrize("hw", DEVICES)
def test_assumptions_of_a_kernel_are_read(hw: str) -> None:
    x = normal(0, 100)
    check(Launch("assumed", (2,), {"X": x, "Y": np.zeros_like(x), "n": 100, "B": 64}, "Y", 2.0 * x), hw)


@pytest.mark.parametrize("hw", DEVICES)
def test_a_norm_of_groups_stores_its_statistics_group_after_group(hw: str) -> None:
    x, w = normal(0, 6, 2, 40), normal(1, 80)
    wide = x.astype(np.float64)
    rstd = 1 / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5)
    words = {"X": x.reshape(6, 80), "W": w, "Y": np.zeros((6, 80), np.float32), "M": 6, "n": 40, "B": 64}
    words["Rstd"] = np.zeros(12, np.float32)
    wanted = (wide * rstd).reshape(6, 80) * w
    check(Launch("grouped_norm", (6, 2), words, "Y", wanted), hw)
    check(Launch("grouped_norm", (6, 2), words, "Rstd", rstd[..., 0].T.ravel()), hw)


@pytest.mark.parametrize("hw", DEVICES)
def test_results_of_unlike_shapes_are_read_as_a_kernel_each(hw: str) -> None:
    q, k, angle = normal(0, 6, 4, 32), normal(1, 6, 2, 32), normal(2, 6, 32)
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)

    def turned(x: Any) -> Any:
        a, b, c, s = (v.astype(np.float64) for v in (x[..., :16], x[..., 16:], cos[:, None, :16], sin[:, None, :16]))
        return np.concatenate([a * c - b * s, b * c + a * s], -1)

    words = {"Q": q, "K": k, "Cos": cos, "Sin": sin, "HQ": 4, "HK": 2, "HD": 32, "BQ": 4, "BK": 2}
    done = check(Launch("rope_both", (6,), words, "Q", turned(q)), hw)
    assert [n for n in done.notes if "the results have different shapes: npusim treats the kernel as 2 kernels" in n]
    check(Launch("rope_both", (6,), words, "K", turned(k)), hw)
    # One launch runs both kernels, which share its code: 4 and 2 of the 6 heads.
    phases = done.program.phases
    assert [p.is_joined for p in phases] == [False, True]
    alone = check(Launch("rope_both", (6,), {**words, "HK": 4, "K": normal(1, 6, 4, 32), "BK": 4}, "Q", turned(q)), hw)
    assert done.timing is not None
    assert alone.timing is not None
    assert done.timing.stream_s == alone.timing.stream_s


@pytest.mark.parametrize("hw", DEVICES)
def test_a_result_that_another_is_computed_from_is_no_kernel_of_its_own(hw: str) -> None:
    x = normal(0, 64)
    words = {"X": x, "Y": np.zeros_like(x), "Z": np.zeros(1, np.float32), "n": 60, "B": 64}
    with pytest.raises(ProgramError, match=r"engine_kernels\.py:\d+: "):
        check(Launch("read_back", (1,), words, "Y", 2.0 * x), hw)


@pytest.mark.parametrize("hw", DEVICES)
def test_a_factor_is_scaled_by_row_in_a_loop(hw: str) -> None:
    chunks, size, heads, d, n = 2, 48, 2, 32, 16
    x, b = normal(0, chunks * size, heads, d, fmt="float16"), normal(1, chunks * size, n, fmt="float16")
    decay = -np.cumsum(np.abs(normal(2, heads, chunks, size)), -1, dtype=np.float32) / 8
    dt = np.abs(normal(3, heads, chunks, size))
    scale = (np.exp(decay[..., -1:].astype(np.float64) - decay) * dt).reshape(heads, -1)
    each = np.einsum("thd,tn,ht->thdn", x.astype(np.float64), b.astype(np.float64), scale)
    wanted = each.reshape(chunks, size, heads, d, n).sum(1)
    words = {"X": x, "B": b, "Out": np.zeros((chunks, heads, d, n), np.float32), "Dt": dt, "Decay": decay}
    words |= {"S": chunks * size, "H": heads, "CHUNK": size, "D": d, "N": n, "BK": 16}
    check(Launch("chunk_states", (chunks, heads), words, "Out", wanted), hw, close=6e-4)


@pytest.mark.parametrize("hw", DEVICES)
def test_loops_over_blocks_of_other_sizes_are_read_iteration_by_iteration(hw: str) -> None:
    x = normal(0, 16, 128)
    words = {"X": x, "Y": np.zeros(16, np.float32), "N": 128, "B": 32, "C": 16, "M": 16}
    check(Launch("two_loops", (1,), words, "Y", x.astype(np.float64).sum(1)), hw)


@pytest.mark.parametrize("hw", DEVICES)
def test_a_loss_reads_the_score_of_a_loaded_class(hw: str) -> None:
    x, of = normal(0, 6, 100), np.random.default_rng(1).integers(0, 100, 6)
    wide = x.astype(np.float64)
    words = {"X": x, "Class": of, "Loss": np.zeros(6, np.float32), "n": 100, "B": 64}
    check(Launch("loss_of_class", (6,), words, "Loss", np.log(np.exp(wide).sum(1)) - wide[np.arange(6), of]), hw)


@pytest.mark.parametrize("hw", DEVICES)
def test_hidden_elements_of_a_librarys_exponential_are_0(hw: str) -> None:
    x = normal(0, 4, 50)
    e = np.exp(x.astype(np.float64) - x.max(1, keepdims=True))
    check(
        Launch("library_softmax", (4,), {"X": x, "Y": np.zeros_like(x), "n": 50, "B": 64}, "Y", e / e.sum(1)[:, None]),
        hw,
    )


@pytest.mark.parametrize("hw", DEVICES)
def test_a_loop_stores_its_state_each_time(hw: str) -> None:
    x = normal(0, 4, 50)
    words = {"X": x, "Y": np.zeros_like(x), "n": 50, "steps": 4, "B": 64}
    check(Launch("carried_blocks", (1,), words, "Y", np.cumsum(x, 0)), hw)


@pytest.mark.parametrize("hw", DEVICES)
def test_errors_of_a_kernel_with_scratch_in_its_loop_are_numbers(hw: str) -> None:
    q, k, v = (normal(seed, 64, 32, fmt="float16") for seed in range(3))
    scores = q.astype(np.float64) @ k.astype(np.float64).T * 0.17
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    wanted = weights @ v.astype(np.float64) / weights.sum(-1, keepdims=True)
    words = {"Q": q, "K": k, "V": v, "O": np.zeros_like(q), "Scratch": np.zeros(64, np.float32), "S": 64}
    launch = Launch("streamed", (2,), {**words, "D": 32, "BM": 32, "BN": 32}, "O", wanted)
    assert check(launch, hw).numerics.error.rmse < 1e-3


def test_a_function_that_flushes_subnormal_numbers_does_so_or_is_refused() -> None:
    from ttir.stored import stored

    x = np.repeat(np.array([-95, -87], np.float32), 8)
    words = {"X": x, "Y": np.zeros_like(x), "B": 16, "HOW": "exp"}
    wanted = np.where(x < -90, 0, np.exp(x.astype(np.float64)))
    done = check(Launch("approximated", (1,), words, "Y", wanted), "h200", 1e-5)
    assert not stored(done, words)["Y"][:8].any()
    x = np.repeat(np.array([3, 87], np.float32), 8)
    words = {**words, "X": x, "HOW": "log2"}
    done = check(Launch("approximated", (1,), words, "Y", np.log2(x.astype(np.float64))), "h200", 1e-6)
    assert any("lg2.approx" in n for n in done.notes)


def test_a_result_that_a_loop_reads_by_a_carried_pointer_is_no_input() -> None:
    words = {"X": normal(0, 256), "P": np.ones(256, np.float32), "Q": np.zeros(4, np.float32), "B": 16}
    with pytest.raises(ProgramError, match=r"engine_kernels\.py:\d+: P is stored to and also accessed elsewhere"):
        check(Launch("summed_result", (4,), words, "Q", words["Q"]), "h200")


def test_one_memory_by_two_names_is_not_loaded_behind_a_store() -> None:
    x, q = normal(0, 64), np.zeros(4, np.float32)
    why = r"engine_kernels\.py:\d+: X is loaded after a store to P, and both share one piece of memory"
    with pytest.raises(SpecError, match=why):
        check(Launch("stored_then_loaded", (4,), {"X": x, "P": x, "Q": q, "B": 16}, "Q", q), "h200")
    words = {"X": x, "P": np.zeros_like(x), "Q": q, "B": 16}
    check(Launch("stored_then_loaded", (4,), words, "Q", x.astype(np.float64).reshape(4, 16).sum(1)), "h200")
    check(Launch("doubled", (4,), {"X": x, "Y": x, "B": 16}, "Y", 2 * x.astype(np.float64)), "h200")
    halves = normal(1, 128)
    words |= {"X": halves[:64], "P": halves[64:]}
    check(Launch("stored_then_loaded", (4,), words, "Q", halves[:64].astype(np.float64).reshape(4, 16).sum(1)), "h200")


def test_one_memory_by_two_names_is_in_place_where_all_offsets_are_the_same() -> None:
    x = normal(0, 2, 7, 16)
    words = {"X": x, "Y": x, "T": 7, "LAG": 0, "D": 16}
    check(Launch("doubled_rows", (2,), words, "Y", 2 * x.astype(np.float64)), "h200")
    with pytest.raises(SpecError, match=r"engine_kernels\.py:\d+: X is loaded after a store to Y"):
        check(Launch("doubled_rows", (2,), words | {"LAG": 1}, "Y", x), "h200")
