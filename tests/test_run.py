"""``npusim.run`` end to end: the main job, real input, the same bits every way, and bad input."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from numerics.test_executor import plain_attention

import npusim
from npusim.config.packaged import packaged_tensors
from npusim.errors import NpusimError, SpecError, TensorError, TilingError
from npusim.kernels.declare import define
from npusim.machines.base import Machine
from npusim.simulation import chosen_tile as tile
from npusim.simulation.tensor_files import load_tensors

if TYPE_CHECKING:
    from pathlib import Path

    from npusim.config.device import DeviceSpec

pytestmark = pytest.mark.usefixtures("declared_tiles")

REAL = "smollm2_layer18_group.safetensors"


def bits(result: npusim.RunResult) -> Any:
    return np.asarray(result.output).view(np.uint16)


def small(**changes: Any) -> npusim.RunResult:
    """Return flash of 5 heads over 300 tokens, with whatever a test changes."""
    return npusim.run("flash", **{"seq": 300, **changes})


# ---------------------------------------------------------------- the main job


def test_flash_runs_with_no_other_argument() -> None:
    result = npusim.run("flash")
    # Defaults of design section 5: 910B2, PanGu-38B's 5 heads of 128, 4096 tokens, causal.
    assert (result.device.name, result.workload) == ("ascend_910b2", "pangu_38b")
    p = result.problem
    assert (p.heads, p.head_dim, p.seq_q, p.seq_kv, p.causal) == (5, 128, 4096, 4096, True)
    assert result.numerics is not None
    assert result.numerics.sample == "rows 3968..4095 of 5 of 5 heads (640 of 20480 rows)"
    assert result.numerics.error.rmse <= 1e-3
    # The matrix unit alone needs two products of every visible tile: a lower bound of the cycles.
    tiles = sum(-(-(row + 128) // 512) * 512 for row in range(0, 4096, 128)) * 128
    fractals = 5 * 2 * tiles * 128 / 16**3
    assert result.cycles >= fractals / 24
    assert result.latency_us == pytest.approx(20 + result.cycles / 1800)
    # flops: 2 products x 2 x 128 x (4096 * 4097 / 2) pairs x 5 heads.
    flops = 2 * 2 * 128 * (4096 * 4097 // 2) * 5
    assert result.tflops == pytest.approx(flops / result.latency_us / 1e6)


@pytest.fixture(scope="module")
def real() -> npusim.RunResult:
    return npusim.run("flash", workload="smollm2", tensors=REAL, causal=True, rows="all", heads="all")


def test_real_input_is_within_a_thousandth_of_float64_on_all_rows(real: npusim.RunResult) -> None:
    assert real.numerics is not None
    assert real.numerics.sample == "all 3072 rows"
    assert real.numerics.error.rmse <= 1e-3
    # Measured again here, not with the package's own reference.
    tensors = load_tensors(REAL)
    expected = plain_attention(**tensors, problem=real.problem)
    error = np.linalg.norm(real.output.astype(np.float64) - expected) / np.linalg.norm(expected)
    assert error == pytest.approx(real.numerics.error.rmse, rel=1e-6)


def test_real_input_gives_the_same_bits_again_and_with_every_timing_method(real: npusim.RunResult) -> None:
    again = npusim.run("flash", workload="smollm2", tensors=REAL, causal=True, rows="all", heads="all")
    assert (bits(again) == bits(real)).all()
    for method in ("des", "block"):
        last = npusim.run("flash", workload="smollm2", tensors=REAL, causal=True, rows=[1023], method=method)
        assert (bits(last)[:, :, -64:] == bits(real)[:, :, -64:]).all()
    assert real.output.shape == (1, 3, 1024, 64)


def test_tensors_by_name_by_path_and_as_arrays_are_the_same(real: npusim.RunResult) -> None:
    path = packaged_tensors(REAL)
    assert path is not None
    for source in (path, str(path), load_tensors(path)):
        result = npusim.run("flash", workload="smollm2", tensors=source, causal=True, rows=[1023])
        assert (bits(result)[:, :, -64:] == bits(real)[:, :, -64:]).all()


def test_two_runs_agree_in_bits_and_cycles() -> None:
    a, b = small(), small()
    assert (bits(a) == bits(b)).all()
    assert a.timing == b.timing


def test_seeds_change_bits_and_no_cycle() -> None:
    a, b = small(seed=1), small(seed=2)
    assert (a.output != b.output).any()
    assert a.cycles == b.cycles


def test_time_covers_everything_whatever_is_computed() -> None:
    all_rows, nothing = small(rows="all"), small(numerics=False)
    assert all_rows.cycles == nothing.cycles
    assert nothing.output is None


def test_options_replace_the_workloads_sizes() -> None:
    p = npusim.run(
        "flash", workload="llama2_70b", seq_q=1, seq_kv=77, batch=3, tensor_parallel=16, causal=False, numerics=False
    ).problem
    # 64 query heads on 16 devices; each of 8 KV heads is kept by two of them.
    assert (p.batch, p.heads, p.kv_heads, p.seq_q, p.seq_kv, p.causal) == (3, 4, 1, 1, 77, False)


def test_a_faster_clock_takes_as_many_cycles_less_time_but_for_its_links() -> None:
    slow, fast = small(numerics=False), small(numerics=False, overrides={"clock_hz": "3.6e9"})
    assert fast.latency_us < slow.latency_us
    assert fast.cycles >= slow.cycles


def test_the_launch_is_in_the_latency_and_not_in_the_cycles() -> None:
    # All of it: else a tile is chosen for the call, with its launch.
    tile = {"deal": "round_robin", "depth": 2, "block_q": 128, "block_kv": 256, "vector_rows": 16}
    plain = small(numerics=False, tiling=tile)
    long = small(numerics=False, tiling=tile, overrides={"launch.kernel_overhead_s": "1e-3"})
    assert long.cycles == plain.cycles
    assert long.latency_us - plain.latency_us == pytest.approx(1000 - 20)


def test_a_changed_number_that_this_run_does_not_hang_on_is_said() -> None:
    key, other = "launch.kernel_overhead_s", "links.hbm.bytes_per_s"  # h200's products have an overhead of their own
    changed = npusim.run("flash", hw="h200", seq=300, numerics=False, overrides={key: "1e-6", other: "1e11"})
    said = f"-C {key}=1e-6 changes no time here: this run has the same time with the number in the device file"
    assert [note for note in changed.notes if note.startswith("-C ")] == [said]


def test_a_changed_number_that_a_node_does_not_hang_on_is_said_too() -> None:
    simple, ll = (f"drivers.sm.modes.{mode}.start_s" for mode in ("simple", "ll"))
    changed = npusim.run(
        "allreduce", hw="h200_x2", numerics=False, problem={"bytes": 1 << 25}, overrides={simple: "1e-6", ll: "9e-6"}
    )
    said = f"-C {ll}=9e-6 changes no time here: this run has the same time with the number in the device file"
    assert [note for note in changed.notes if note.startswith("-C ")] == [said]


def test_a_changed_clock_says_that_products_have_another() -> None:
    multiplies = npusim.run("flash", hw="h200", seq=300, numerics=False, overrides={"clock_hz": "1e9"})
    moves = npusim.run("copy", hw="h200", numerics=False, problem={"bytes": 1 << 20}, overrides={"clock_hz": "1e9"})
    said = [[note for note in run.notes if "products_clock_hz" in note] for run in (multiplies, moves)]
    assert said == [["-C clock_hz=1e9: the clock of a run with products is products_clock_hz; change that key"], []]


# ---------------------------------------------------------------- bad input


def given(**changes: Any) -> dict[str, Any]:
    tensors = {n: np.ones((1, 2, 20, 16), np.float16) for n in ("q", "k", "v")}
    return {**tensors, **changes}


def ones(*shape: int, dtype: Any = np.float16) -> Any:
    return np.ones(shape, dtype)


WITH_NAN = ones(1, 2, 20, 16)
WITH_NAN[0, 1, 7, 3] = WITH_NAN[0, 1, 9, 0] = np.nan

BAD_TENSORS: dict[str, tuple[dict[str, Any], str]] = {
    "three axes": (
        given(k=ones(2, 20, 16)),
        r"k has shape \(2, 20, 16\); layout bnsd has 4 axes \(batch, heads, tokens, head size\)",
    ),
    "keys and values": (given(v=ones(1, 2, 21, 16)), r"keys 20 but values 21"),
    "head sizes": (given(q=ones(1, 2, 20, 32)), r"head size 32 of q but 16 of k"),
    "heads": (given(q=ones(1, 3, 20, 16)), r"heads 3, 2, 2: the heads of q must be a multiple of those"),
    "batches": (given(v=ones(2, 2, 20, 16)), r"batch 1, 1, 2"),
    "one of another dtype": (given(q=ones(1, 2, 20, 16, dtype=np.float32)), r"float32"),
    "integers": (given(**{n: ones(1, 2, 20, 16, dtype=np.int16) for n in "qkv"}), r"q is int16; must be float16 or "),
    "nan": (given(k=WITH_NAN), r"k has 2 NaN, the first at \(0, 1, 7, 3\)"),
    "a missing key": ({"q": ones(1, 2, 20, 16), "k": ones(1, 2, 20, 16)}, r"it has k, q"),
    "two prefixes": (
        {f"{p}.{n}": ones(1, 2, 20, 16) for p in "ab" for n in "qkv"},
        r"one <prefix>\.q, .* it has a\.k, ",
    ),
}


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_bad_tensors_are_refused_with_what_is_wrong(case: str) -> None:
    tensors, message = BAD_TENSORS[case]
    with pytest.raises(TensorError, match=message):
        npusim.run("flash", tensors=tensors, causal=False)


def test_a_head_size_of_tensors_that_is_no_multiple_of_16_is_filled_up_and_the_output_has_it() -> None:
    tensors = {n: ones(1, 2, 20, 24) for n in "qkv"}
    result = npusim.run("flash", tensors=tensors, causal=False, rows="all", heads="all")
    assert result.output.shape == (1, 2, 20, 24)
    assert (result.output == 1).all()
    assert any("24" in note and "32" in note for note in result.notes)


def test_a_truncated_file_is_refused_by_name(tmp_path: Path) -> None:
    whole = packaged_tensors(REAL)
    assert whole is not None
    data = whole.read_bytes()
    for size in (4, 100, len(data) // 2, len(data) - 1):
        cut = tmp_path / "cut.safetensors"
        cut.write_bytes(data[:size])
        with pytest.raises(TensorError, match=r"cut\.safetensors: not a readable tensor file, or truncated"):
            npusim.run("flash", tensors=cut)


def test_a_file_that_does_not_exist_is_refused_with_the_packaged_ones() -> None:
    with pytest.raises(TensorError, match=rf"smol\.safetensors: no such file.*packaged: .*{REAL}"):
        npusim.run("flash", tensors="smol.safetensors")


def test_sizes_beside_tensors_are_refused() -> None:
    with pytest.raises(SpecError, match=r"seq, batch: the tensors already have the sizes"):
        npusim.run("flash", tensors=given(), seq=20, batch=1)


BAD_OPTIONS: dict[str, tuple[dict[str, Any], type[NpusimError], str]] = {
    "schedule": ({"schedule": "flsh"}, SpecError, r"unknown schedule 'flsh'\. Did you mean `flash`\? Allowed: .*flash"),
    "precision": ({"precision": "fa2_fp16"}, SpecError, r"fa2_fp16.*fa2_fp32"),
    "method": ({"method": "blokc"}, SpecError, r"method 'blokc'; allowed: auto, des, block"),
    "hardware": ({"hw": "ascend_910b5"}, SpecError, r"ascend_910b5.*ascend_910b[1-4]"),
    "workload": ({"workload": "pangu_83b"}, SpecError, r"pangu_83b.*pangu_38b"),
    "tiling field": ({"tiling": {"block_kw": 128}}, TilingError, r"block_kw: unknown tiling field.*block_kv"),
    "tiling value": ({"tiling": {"block_kv": 100}}, TilingError, r"block_kv.*100.*16"),
    "tensor parallel": (
        {"tensor_parallel": 7},
        SpecError,
        r"7 does not divide 40 query heads; possible: 1 2 4 5 8 10 20 40",
    ),
    "override": (
        {"overrides": {"clock": "1"}},
        SpecError,
        r"-C clock=1: there is no key 'clock'\. Did you mean `clock_hz`\?",
    ),
    "override of another type": ({"overrides": ["clock_hz"]}, SpecError, r"overrides: expected a mapping of dotted"),
    "override without a key": ({"overrides": {3: 8}}, SpecError, r"-C 3=8: a key is text"),
    "groups of another type": ({"trace_groups": 0}, SpecError, r"trace_groups: expected numbers of core groups, got 0"),
    "more causal queries than keys": (
        {"seq_q": 8, "seq_kv": 4, "causal": True},
        SpecError,
        r"8 causal queries but only 4 keys",
    ),
    "no tokens": ({"seq": 0}, SpecError, r"seq_q: .*0"),
}


@pytest.mark.parametrize("case", BAD_OPTIONS)
def test_bad_options_are_refused_with_what_there_is(case: str) -> None:
    options, error, message = BAD_OPTIONS[case]
    with pytest.raises(error, match=message):
        npusim.run(**{"schedule": "flash", "numerics": False, **options})


@pytest.mark.parametrize("choice", [{"heads": [5]}, {"rows": [300]}, {"heads": [-1]}, {"rows": []}])
def test_rows_and_heads_that_do_not_exist_are_refused(choice: dict[str, Any]) -> None:
    with pytest.raises(SpecError):
        small(**choice)


@pytest.mark.parametrize("choice", [{"heads": [0, 5]}, {"rows": [0, 300]}])
def test_a_row_or_head_too_many_is_not_left_out_in_silence(choice: dict[str, Any]) -> None:
    with pytest.raises(SpecError):
        small(**choice)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_an_infinite_input_is_refused_as_a_nan_is() -> None:
    infinite = ones(1, 2, 20, 16)
    infinite[0, 0, 3, 3] = np.inf
    with pytest.raises(TensorError, match="k has 1 Inf"):
        npusim.run("flash", tensors=given(k=infinite), causal=False)


@pytest.mark.parametrize("hw", ["ascend_910b2", "h200", "v100"])
def test_a_run_makes_one_machine_of_its_device(hw: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, init = list[object](), Machine.__init__

    def counted(self: Machine, device: DeviceSpec) -> None:
        made.append(device)
        init(self, device)

    for known in (tile._one_device, tile._of_content, tile._choice, define._machine):
        known.cache_clear()
    monkeypatch.setattr(Machine, "__init__", counted)
    npusim.run("flash", hw=hw, seq=512, numerics=False)
    assert len(made) == 1
