"""K and V on the host: FastAttention's Table 3, the host's bits, what a node's file must have."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import npusim
from npusim.config.load import load_device
from npusim.config.node_file import load_node
from npusim.config.problem import Problem, SharedProblem
from npusim.errors import SpecError, TilingError
from npusim.formats import exp, get_format
from npusim.library import find_schedule
from npusim.program.numerics.evaluate import evaluate
from npusim.program.numerics.input_tensors import array_source
from npusim.studies.validate.measured_times import validate_times
from tests.formats.reference import fma_reference

TABLE_3 = Path(__file__).parents[3] / "shared" / "measurements" / "papers_offload.yaml"
TOKEN = SharedProblem.around(Problem(heads=5, seq_q=1, seq_kv=16384, head_dim=128), ranks=8)


def us(schedule: str = "offload_cooperative", problem: SharedProblem = TOKEN, **options: object) -> float:
    return float(npusim.run(schedule, problem=problem, numerics=False, trace_groups=(), **options).latency_us)  # type: ignore[arg-type]


@pytest.mark.skipif(not TABLE_3.exists(), reason="../shared/measurements/papers_offload.yaml is not there")
def test_table_3_is_within_ten_per_cent_and_its_constants_name_the_rows_they_are_fitted_on() -> None:
    report = validate_times(TABLE_3, band=0.1)
    assert len(report.residuals) == 35
    assert report.is_passed
    assert report.worst_abs_error > 0.05  # it is a prediction, not a table
    fitted = {c for _, fact in load_node("v100_x8").facts() for c in fact.fitted_on or ()}
    assert fitted == {f"offload_{way}_{n}k" for way in ("classic", "coop") for n in (16, 256)}


def test_parts_are_what_the_operations_took_and_the_shared_memory_of_the_host_is_one() -> None:
    result = npusim.run("offload_cooperative", problem=TOKEN, numerics=False)
    parts = result.timing.parts_s  # type: ignore[union-attr]
    assert set(parts) == {"offload", "cpu", "return"}
    assert sum(parts.values()) * 1e6 == pytest.approx(result.latency_us)
    assert "no pipe is the limit" not in str(result)
    assert "limit      dram, at " in str(result)
    assert "the busiest pipe is CPU of host0" in str(result)
    assert result.timing.link_bytes["dram"] > 8 * TOKEN.kv_bytes()  # type: ignore[union-attr]
    alone = TOKEN.model_copy(update={"ranks": 1})
    assert us(problem=alone) < us() / 7  # one device's heads have all of the memory


@pytest.mark.parametrize(
    ("schedule", "key", "value"),
    [
        ("offload_cooperative", "cpu.dram_bytes_per_s", "2e11"),
        ("offload_cooperative", "cpu.cores_count", "1"),
        ("offload_cooperative", "cpu.clock_hz", "1e7"),
        ("offload_cooperative", "pcie.start_s", "0"),
        ("offload_cooperative", "pcie.wake_s", "0"),
        ("offload_classic", "pcie.bytes_per_s", "2e10"),
        ("offload_classic", "pcie.kv_start_s", "0"),
        ("offload_classic", "kernels.decode.bytes_per_s", "7e11"),
        ("offload_classic", "cpu.dram_bytes_per_s", "5e10"),
    ],
)
def test_each_number_of_the_host_changes_a_prediction(schedule: str, key: str, value: str) -> None:
    assert us(schedule, overrides={key: value}) != us(schedule)


def test_our_own_attention_takes_the_place_of_the_stated_one() -> None:
    assert us("offload_classic", tiling={"attention": "split_kv"}) < us("offload_classic")
    notes = npusim.run("offload_classic", problem=TOKEN, numerics=False).notes
    assert any("simulated split_kv" in note and "of the memory's bandwidth" in note for note in notes)


def test_in_prefill_keys_and_values_go_down_beside_the_attention() -> None:
    prompt = SharedProblem.around(Problem(heads=5, seq_q=1024, head_dim=128, causal=True), ranks=8)
    result = npusim.run("offload_cooperative", problem=prompt, numerics=False)
    parts = result.timing.parts_s  # type: ignore[union-attr]
    assert set(parts) == {"offload", "attention"}
    assert result.latency_us == pytest.approx(max(parts.values()) * 1e6)


def test_the_hosts_bits_are_those_of_scalar_fused_multiply_adds() -> None:
    draw, (keys, size) = np.random.default_rng(3), (32, 16)
    q, k, v = (draw.standard_normal((1, 1, n, size)).astype(np.float16) for n in (1, keys, keys))
    problem = Problem(heads=1, seq_q=1, seq_kv=keys, head_dim=size)
    schedule, device = find_schedule("flash", "cpu"), load_device("xeon_avx512")
    program = schedule.program(problem, schedule.tiling(), device, schedule.precision())
    source = array_source({"q": q, "k": k, "v": v}, problem.data)
    found = evaluate(program, problem, source, rows="all", heads="all").output
    half, single = get_format("float16"), get_format("float32")

    def chain(a: np.ndarray, b: np.ndarray) -> np.float32:
        total, left = 0, half if a.dtype == np.float16 else single
        for x, y in zip(a.view(left.bits_dtype), b.view(np.uint16), strict=True):
            total = fma_reference(int(x), int(y), total, left, single, half)
        return np.uint32(total).view(np.float32)

    scores = np.array([chain(q[0, 0, 0], key) for key in k[0, 0]]) * np.float32(problem.scale)
    weights = exp(scores - scores.max(), "float32")
    total = weights
    while len(total) > 1:
        total = total[: len(total) // 2] + total[len(total) // 2 :]
    out = np.array([chain(weights, np.ascontiguousarray(v[0, 0, :, c])) for c in range(size)])
    expected = (out / total[0]).astype(np.float16)
    np.testing.assert_array_equal(found[0, 0, 0].view(np.uint16), expected.view(np.uint16))


def test_host_and_device_give_other_bits_of_the_same_attention() -> None:
    token = SharedProblem.around(Problem(heads=1, seq_q=1, seq_kv=256, head_dim=64), ranks=2)
    outputs = [npusim.run(f"offload_{way}", problem=token).output for way in ("classic", "cooperative")]
    assert outputs[0].shape == (1, 2, 1, 64)
    assert not np.array_equal(*outputs)
    np.testing.assert_allclose(outputs[0].astype(float), outputs[1].astype(float), atol=2e-3)


def test_bad_input_says_what_is_missing() -> None:
    with pytest.raises(TilingError, match=r"ascend_910b2_x8: pcie: missing; offloading needs a link"):
        us("offload_classic", hw="ascend_910b2_x8")
    node = load_node("v100_x8")
    with pytest.raises(TilingError, match=r"v100_x8: cpu: missing; cooperative"):
        us(hw=node.model_copy(update={"cpu": None}))
    with pytest.raises(TilingError, match="16 ranks, but v100_x8 has 8 devices"):
        us(problem=TOKEN.model_copy(update={"ranks": 16}))
    with pytest.raises(SpecError, match="needs a layer of a workload, not a Problem"):
        npusim.run("offload_classic", problem=TOKEN.attention, numerics=False)
