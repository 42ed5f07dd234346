"""Pointers that a kernel loads: the tensors to which the addresses belong are further arguments of a recorded call."""

from __future__ import annotations

import re
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest

import npusim
from npusim.errors import NpusimError
from npusim.kernels.triton import live_tensors
from npusim.kernels.triton.addresses import as_addressed
from npusim.kernels.triton.calls import read_calls

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: npusim[triton]"),
    pytest.mark.usefixtures("without_warp_code"),
]
Array = np.ndarray[Any, Any]


def addresses(tensors: Sequence[Array]) -> Array:
    """Return the addresses of some tensors, as a program passes them to a kernel."""
    return np.array([x.ctypes.data for x in tensors], np.int64)


def recorded(kernel: str, grid: tuple[int, ...], words: dict[str, Any]) -> Any:
    """Return the recorded launch of a kernel."""
    with npusim.record(floats=True) as calls:
        getattr(import_module("ttir.address_kernels"), kernel)[grid](**words)
    return calls[0]


def stored_behind(call: Any, table: str, hw: str) -> list[Array]:
    """Run a call; return the elements of each tensor to which the addresses of a table belong, by their spans."""
    from ttir.stored import stored

    name, given = as_addressed(table), {n: x.data for n, x in call.tensors.items()}
    made = np.asarray(stored(npusim.run(call, hw=hw, rows="all"), given)[name], np.float64)
    whole = np.where(np.isnan(made), given[name].astype(np.float64), made).reshape(len(given[name]), -1)
    sizes = [end - first for first, end in call.tensors[name].spans]
    return [row[:n] for row, n in zip(whole, sizes, strict=True)]


HARDWARE = pytest.mark.parametrize("hw", ["h200", "ascend_910b2"])


@HARDWARE
def test_bytes_are_copied_between_tensors_of_unlike_sizes(hw: str) -> None:
    rng = np.random.default_rng(0)
    of, to = ([rng.standard_normal(n).astype(np.float32) for n in (100, 256, 300)] for _ in range(2))
    sizes = np.array([x.nbytes for x in of], np.int64)
    words: dict[str, Any] = {
        "source_addresses": addresses(of),
        "addresses": addresses(to),
        "sizes": sizes,
        "BLOCK": 256,
    }
    for made, x in zip(stored_behind(recorded("copied_bytes", (3,), words), "addresses", hw), of, strict=True):
        assert np.array_equal(made.astype(np.uint8), x.view(np.uint8))


@HARDWARE
def test_a_grouped_product_multiplies_the_matrices_of_each_group(hw: str, tmp_path: Path) -> None:
    """The call is stored and read again, so that its addresses are not those of this process."""
    rng, rows = np.random.default_rng(1), (64, 40, 100)
    a = [rng.standard_normal((m, 64)).astype(np.float16) for m in rows]
    b = [rng.standard_normal((64, 32)).astype(np.float16) for _ in rows]
    c = [np.zeros((m, 32), np.float16) for m in rows]
    words: dict[str, Any] = {
        "a_ptrs": addresses(a),
        "b_ptrs": addresses(b),
        "c_ptrs": addresses(c),
        "m_ptr": np.array(rows),
    }
    words |= {"N": 32, "K": 64, "BM": 32, "BN": 32, "BK": 32}
    with npusim.record(floats=True) as calls:
        import_module("ttir.address_kernels").grouped_product[4, 3](**words)
    (call,) = read_calls(calls.save(tmp_path / "calls.npz"))
    for made, x, y in zip(stored_behind(call, "c_ptrs", hw), a, b, strict=True):
        right = (x.astype(np.float64) @ y.astype(np.float64)).reshape(-1)
        assert np.sqrt(((made - right) ** 2).mean() / (right**2).mean()) < 6e-4


@HARDWARE
def test_a_list_of_parameters_is_updated_in_place(hw: str) -> None:
    rng, sizes = np.random.default_rng(2), (300, 77, 512)
    p, g = ([rng.standard_normal(n).astype(np.float32) for n in sizes] for _ in range(2))
    words: dict[str, Any] = {
        "p_ptrs": addresses(p),
        "g_ptrs": addresses(g),
        "n_ptr": np.array(sizes),
        "rate": 0.1,
        "BLOCK": 128,
    }
    for made, x, y in zip(stored_behind(recorded("updated", (3, 4), words), "p_ptrs", hw), p, g, strict=True):
        assert np.allclose(made, x - np.float32(0.1) * y, rtol=0, atol=3e-7)


@HARDWARE
def test_tokens_are_scattered_to_the_caches_of_all_layers(hw: str) -> None:
    """The branch of a cache without values is in the text, and no program takes it."""
    rng, n, width = np.random.default_rng(3), 6, 160
    caches = [rng.standard_normal((2, 40, width)).astype(ml_dtypes.bfloat16) for _ in range(2)]
    source = rng.standard_normal((2, 2, n, width)).astype(ml_dtypes.bfloat16)
    index = rng.permutation(40)[:n].astype(np.int32)
    words: dict[str, Any] = {
        "cache_ptrs": addresses(caches).astype(np.uint64),
        "source": source,
        "index": index,
        "n": n,
    }
    call = recorded("scattered", (2, n), words | {"width": width, "is_one": False, "BLOCK": 64})
    for made, x, new in zip(stored_behind(call, "cache_ptrs", hw), caches, source, strict=True):
        right = x.astype(np.float64)
        right[:, index] = new.astype(np.float64)
        assert np.array_equal(made, right.reshape(-1))


def test_an_address_may_be_an_argument() -> None:
    from ttir.stored import stored

    x, out = np.arange(64, dtype=np.float16), np.zeros(64, np.float16)
    call = recorded("doubled", (1,), {"address": x.ctypes.data, "out": out, "BLOCK": 64})
    given = {n: x.data for n, x in call.tensors.items()}
    made = stored(npusim.run(call, hw="h200", rows="all"), given)["out"]
    assert np.array_equal(made, 2.0 * x)


def refused(call: Any) -> str:
    """Return why a call is refused."""
    with pytest.raises(NpusimError) as caught:
        npusim.run(call, hw="h200")
    return str(caught.value)


def test_an_address_of_no_tensor_and_an_access_behind_a_tensor_are_refused() -> None:
    x, out = np.arange(60, dtype=np.float16), np.zeros(64, np.float16)
    call = recorded("doubled", (1,), {"address": x.ctypes.data, "out": out, "BLOCK": 64})
    assert "accesses memory by an address at which the recording found no tensor" in refused(call)
    call = recorded("doubled", (1,), {"address": 1 << 45, "out": out, "BLOCK": 64})
    assert "no address in it belongs to a tensor that the program has at the launch" in refused(call)


def test_a_tensor_that_is_an_argument_in_two_ways_is_refused() -> None:
    p, n = [np.zeros(64, np.float32)], np.array([64])
    words: dict[str, Any] = {"p_ptrs": addresses(p), "g_ptrs": addresses(p), "n_ptr": n, "rate": 0.1, "BLOCK": 64}
    assert "a tensor to which its addresses belong is also given by p_ptrs" in refused(
        recorded("updated", (1, 1), words)
    )


def test_pointers_of_one_table_to_two_types_of_elements_are_refused() -> None:
    x, y, out = np.zeros(64, np.float16), np.zeros(64, np.float32), np.zeros(64, np.float32)
    call = recorded("of_two_kinds", (1,), {"addresses": addresses([x, y]), "out": out, "BLOCK": 64})
    assert "its pointers are to one type of elements" in refused(call)


def bytes_of(x: Array) -> Array:
    """Return the bytes of a tensor, along its last axis."""
    return np.ascontiguousarray(x).view(np.uint8)


def caches() -> tuple[Array, Array, Array, Array]:
    """Return keys, their slots, a cache of 64 numbers of FP8, a scale and 32 bfloat16 for each slot, and the cache with
    the keys.
    """
    rng = np.random.default_rng(4)
    keys, slots = rng.standard_normal((8, 96)).astype(ml_dtypes.bfloat16), rng.permutation(12)[:8].astype(np.int64)
    cache = rng.integers(0, 256, (12, 144)).astype(np.uint8)
    x, whole = keys[:, :64].astype(np.float32), cache.copy()
    scales = np.abs(x).max(1, keepdims=True) / np.float32(448)
    whole[slots, :64] = bytes_of((x / scales).astype(ml_dtypes.float8_e4m3fn))
    whole[slots, 64:68], whole[slots, 68:132] = bytes_of(scales), bytes_of(keys[:, 64:])
    return keys, slots, cache, whole


def test_one_tensor_of_bytes_is_stored_in_three_formats() -> None:
    """An NPU divides exactly, so that all bytes are those of NumPy."""
    from ttir.stored import stored

    keys, slots, cache, wanted = caches()
    words = {"k_ptr": keys, "slot_ptr": slots, "cache": cache, "D": 96, "F": 64, "S": 144}
    call = recorded("inserted", (8,), words | {"OVER": 0})
    made = stored(npusim.run(call, hw="ascend_910b2", rows="all"), {n: x.data for n, x in call.tensors.items()})
    formats = {"cache": ml_dtypes.float8_e4m3fn, "cache__as_f32": np.float32, "cache__as_bf16": ml_dtypes.bfloat16}
    assert made.keys() == formats.keys()
    whole = cache.copy()
    for name, fmt in formats.items():
        values, here = np.asarray(made[name]).reshape(-1), whole.reshape(-1).view(fmt)
        here[~np.isnan(values)] = values[~np.isnan(values)].astype(fmt)
    assert np.array_equal(whole, wanted)
    why = "cache__as_bf16 and cache__as_f32 share memory, and"
    assert why in refused(recorded("inserted", (8,), words | {"OVER": 2}))


@HARDWARE
def test_one_tensor_of_bytes_is_loaded_in_three_formats(hw: str) -> None:
    from ttir.stored import stored

    keys, slots, _, cache = caches()
    out, scales = np.zeros_like(keys), cache[slots, 64:68].copy().view(np.float32)
    words = {"out": out, "slot_ptr": slots, "cache": cache, "D": 96, "F": 64, "S": 144}
    call = recorded("taken_out", (8,), words)
    made = stored(npusim.run(call, hw=hw, rows="all"), {n: x.data for n, x in call.tensors.items()})["out"]
    numbers = cache[slots, :64].copy().view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert np.array_equal(made[:, :64], (numbers * scales).astype(ml_dtypes.bfloat16).astype(np.float64))
    assert np.array_equal(made[:, 64:], keys[:, 64:].astype(np.float64))


@HARDWARE
def test_rows_of_any_format_are_moved_as_bytes(hw: str) -> None:
    from ttir.stored import stored

    keys, slots, *_ = caches()
    cache = np.zeros((12, 96), ml_dtypes.bfloat16)
    call = recorded(
        "moved_bytes",
        (8,),
        {"source": keys[:, :64].copy(), "cache": cache[:, :64].copy(), "slot_ptr": slots, "ROW": 128},
    )
    made = stored(npusim.run(call, hw=hw, rows="all"), {n: x.data for n, x in call.tensors.items()})["cache__as_i8"]
    assert np.array_equal(made[slots].astype(np.uint8), bytes_of(keys[:, :64]))


def test_a_launch_by_hand_has_no_further_arguments() -> None:
    """The tensors of a launch that is written by hand have no addresses, and one format."""
    from ttir import address_kernels

    launch = f"{address_kernels.__file__}::viewed[4](tensor(N).to('float32'), ROW=64)"
    with pytest.raises(NpusimError, match="pointers to a second type of elements, are read in recorded calls only"):
        npusim.run(launch, problem={"N": 256}, hw="h200")


def test_addresses_of_no_whole_elements_are_refused() -> None:
    x, y = [np.arange(64, dtype=np.float32) for _ in range(2)], np.zeros((2, 16), np.float32)
    call = recorded("rows_by_bytes", (2,), {"addresses": addresses(x) + np.array([0, 2]), "Y": y, "by": 8, "B": 16})
    why = r"address_kernels\.py:\d+: program {} has an address that is not at a multiple of 4 bytes of its tensor"
    assert re.search(why.format(r"\(1, 0, 0\)"), refused(call))
    call = recorded("rows_by_bytes", (2,), {"addresses": addresses(x), "Y": y, "by": 6, "B": 16})
    assert re.search(why.format(r"\(0, 0, 0\)"), refused(call))


def test_an_address_that_is_also_a_number_is_refused() -> None:
    """A recorded call has other addresses, whose remainders are no remainders of the program's."""
    x, y = [np.arange(64, dtype=np.float32) for _ in range(2)], np.zeros((2, 16), np.float32)
    call = recorded("chosen_by_alignment", (2,), {"addresses": addresses(x), "Y": y, "BY": 32, "B": 16})
    assert re.search(r"address_kernels\.py:\d+: .* which are used for pointers only", refused(call))


def test_an_address_that_is_also_stored_is_refused() -> None:
    x, out, copy = np.arange(32, dtype=np.float32), np.zeros(16, np.float32), np.zeros(1, np.int64)
    words = {"addresses": addresses([x[:16], x[16:]]), "copy": copy, "out": out, "BLOCK": 16}
    call = recorded("with_addresses_stored", (1,), words)
    assert re.search(r"address_kernels\.py:\d+: .* which are used for pointers only", refused(call))


@HARDWARE
def test_elements_of_tuples_are_arguments(hw: str) -> None:
    from ttir.stored import stored

    x, doubled, more = [np.arange(80, dtype=np.float32).reshape(4, 20) for _ in range(3)]
    words = {"X": x, "results": (doubled, more), "steps": (20, 1), "sizes": (4, 20), "B": 32}
    call = recorded("of_tuples", (4,), words)
    assert [n for n in call.arguments if n.startswith("results")] == ["results", "results_0"]
    made = stored(npusim.run(call, hw=hw, rows="all"), {n: t.data for n, t in call.tensors.items()})
    assert np.array_equal(made["results"], 2 * x)
    assert np.array_equal(made["results_0"], x + 4)


@HARDWARE
def test_parameters_of_a_tuple_and_of_other_arguments_are_told_apart(hw: str) -> None:
    from ttir.stored import stored

    a, b, c = (np.arange(40, dtype=np.float32) + n for n in range(3))
    words = {"X": (a, b), "X_0": c, "scales": (2, 3), "Y": np.zeros(40, np.float32), "n": 40, "B": 16}
    call = recorded("of_like_names", (3,), words)
    assert list(call.tensors) == ["X", "X_0", "X_0_1", "Y"]
    made = stored(npusim.run(call, hw=hw, rows="all"), {n: t.data for n, t in call.tensors.items()})
    assert np.array_equal(made["Y"], 2 * a + 3 * b + c)


def test_a_tensor_of_several_lists_is_one_piece_of_memory_and_may_be_of_a_derived_class() -> None:
    class Derived(np.ndarray[Any, Any]):
        pass

    shared = np.arange(5.0)
    derived = [np.arange(3.0).view(Derived)]
    _lists = [shared], {"of": shared}
    pieces = live_tensors._pieces()
    found = [[(p.size, p.shape) for p in pieces if p.address == x.ctypes.data] for x in (shared, *derived)]
    assert found == [[(40, (5,))], [(24, (3,))]]
