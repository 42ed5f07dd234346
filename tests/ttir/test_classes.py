"""Classes of bits against executed configurations: one class has one output, and what differs has two classes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from hashlib import md5, sha256
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import npusim
from npusim.config.problem import KernelProblem, Problem
from npusim.formats import get_format
from npusim.kernels.triton.compiled_choices import UNKNOWN
from npusim.kernels.triton.compiler import Compiled, compiled_text
from npusim.simulation import classes
from npusim.simulation.request import Request
from npusim.studies.tune.configurations import configurations_of
from npusim.studies.tune.prediction import lettered, predict
from tests.turns import in_turn

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from npusim.studies.tune.prediction import Configuration

if find_spec("triton"):
    import triton

    from tests.ttir import class_kernels

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="npusim[triton] is not installed"),
    pytest.mark.usefixtures("without_warp_code"),
]
HERE = Path(__file__).parent
PRODUCT = "tensor(M, K), tensor(K, N), {bias}tensor(M, N), M, N, K, BM=64, BN=64, BK=32"


@dataclass(frozen=True)
class Drawn:
    """A launch of one of our kernels, sizes and values of fields that are drawn, and inputs.

    ``inputs``: by parameter, sizes of the shape and the format; attention has those of its problem.  Each value has a
    factor from 2^-``spread`` to 2^``spread``, so that orders of a sum round otherwise.  ``differs``: whether outputs of
    the first draw do.  ``first``: configurations of the first draw, each of which Triton compiles.
    """

    launch: str
    sizes: Mapping[str, tuple[int, ...]]
    axes: Mapping[str, tuple[Any, ...]]
    inputs: Mapping[str, tuple[str, str]]
    differs: bool
    spread: int = 6
    file: str = "plain_kernels.py"
    first: int = 5


DRAWN: dict[str, Drawn] = {
    "product": Drawn(
        f"matmul[cdiv(M, BM) * cdiv(N, BN)]({PRODUCT.format(bias='')}, GROUP=8)",
        {"M": (48, 100, 130), "N": (48, 200), "K": (48, 80, 192)},
        {"BM": (32, 64, 128), "BN": (32, 64, 128), "BK": (16, 32, 64), "warps": (4, 8), "GROUP": (1, 8)},
        {"A": ("MK", "float16"), "B": ("KN", "float16")},
        differs=False,
    ),
    "bias_gelu": Drawn(
        f"bias_gelu[M // BM, N // BN]({PRODUCT.format(bias='tensor(N), ')})",
        {"M": (128, 256), "N": (128,), "K": (64, 192)},
        {"BM": (64, 128), "BN": (32, 64), "BK": (16, 32), "warps": (4, 8), "EXACT": (False, True)},
        {"A": ("MK", "float16"), "B": ("KN", "float16"), "Bias": ("N", "float16")},
        differs=True,
    ),
    "attention": Drawn(
        "plain[cdiv(seq_q, BM), batch * heads](q, k, v, o, scale * log2e, seq_kv, D=head_dim, BM=64, BN=64, "
        "CAUSAL=causal)",
        {"seq": (100, 192, 256), "causal": (0, 1)},
        {"BM": (64, 128), "BN": (16, 32, 64), "warps": (4, 8), "stages": (1, 2)},
        {},
        differs=True,
        spread=0,
        file="kernels.py",
    ),
    "softmax": Drawn(
        "softmax[P](tensor(R, C).to('float32'), tensor(R, C).to('float32'), R, C, BLOCK=1024)",
        {"R": (9, 16), "C": (500, 900, 1000), "P": (3, 4)},
        {"BLOCK": (1024, 2048), "warps": (1, 2, 4, 8, 16), "stages": (2, 3)},
        {"In": ("RC", "float32")},
        differs=True,
    ),
    "row_sum": Drawn(
        "row_sum[R](tensor(R, C).to('float32'), tensor(R).to('float32'), C, BLOCK=1024)",
        {"R": (8,), "C": (100, 777, 1000, 1024)},
        {"BLOCK": (1024, 2048), "warps": (1, 2, 4, 8, 16)},
        {"X": ("RC", "float32")},
        differs=True,
    ),
    "norm": Drawn(
        "rms_norm[R](tensor(R, C), tensor(R, C), tensor(C), tensor(R).to('float32'), C, 1e-6, BLOCK=1024)",
        {"R": (64,), "C": (640, 1000, 1024)},
        {"BLOCK": (1024, 2048), "warps": (1, 2, 4, 8, 16)},
        {"X": ("RC", "float16"), "W": ("C", "float16")},
        differs=True,
        first=8,
        file="tuned_kernels.py",
    ),
    "long_norm": Drawn(
        "long_norm[R](tensor(R, C), {v}, {v}, tensor(R, C), {r}, {r}, C, 1e-5, BLOCK=64)".format(
            v="tensor(C).to('float32')", r="tensor(R).to('float32')"
        ),
        {"R": (64,), "C": (200, 512)},
        {"BLOCK": (64, 128), "warps": (1, 2, 4), "stages": (1, 2, 3)},
        {"X": ("RC", "float16"), "W": ("C", "float32"), "B": ("C", "float32")},
        differs=True,
        first=8,
    ),
    "long_softmax": Drawn(
        "long_softmax[R](tensor(R, C), tensor(R, C), C, B=64)",
        {"R": (8,), "C": (200, 512)},
        {"B": (64, 128), "warps": (1, 2, 4), "stages": (1, 2, 3)},
        {"X": ("RC", "float16")},
        differs=True,
        spread=0,
    ),
}
#: Configurations of a draw.
COUNT = 8


@cache
def drawn_of(case: str, seed: int) -> tuple[list[Configuration], list[str]]:
    """Return drawn configurations of one drawn problem, and a digest of all bits that each gives for one input."""
    drawn, draw, rng = DRAWN[case], Random(f"{case} {seed}"), np.random.default_rng(seed)
    sizes = {n: draw.choice(values) for n, values in drawn.sizes.items()}

    def values(shape: Sequence[int], fmt: str) -> Any:
        return (rng.standard_normal(shape) * np.exp2(rng.integers(-drawn.spread, drawn.spread + 1, shape))).astype(fmt)

    if drawn.inputs:
        problem: Any = KernelProblem.of(sizes)
        tensors = {n: values([sizes[s] for s in shape], fmt) for n, (shape, fmt) in drawn.inputs.items()}
    else:
        seq = sizes["seq"]
        problem = Problem(heads=2, seq_q=seq, seq_kv=seq, head_dim=64, causal=bool(sizes["causal"]))
        tensors = {n: values((1, 2, seq, 64), "float16") for n in "qkv"}
    request = Request(f"{HERE / drawn.file}::{drawn.launch}", hw="h100", problem=problem)
    points = draw.sample(list(product(*drawn.axes.values())), COUNT)[: COUNT if seed else drawn.first]
    listed, outputs = [], []
    for point in points:
        listed += configurations_of(request, {n: (v,) for n, v in zip(drawn.axes, point, strict=True)})
        result = npusim.run(
            listed[-1].request.schedule,
            hw="h100",
            problem=problem,
            tiling=listed[-1].request.tiling,
            rows="all",
            heads="all",
            tensors={n: t.copy() for n, t in tensors.items()},
        )
        assert result.numerics is not None
        assert result.numerics.computed.all()
        outputs.append(sha256(np.ascontiguousarray(result.output).tobytes()).hexdigest())
    return listed, outputs


def outputs_by_class(case: str, seed: int) -> dict[str, set[str]]:
    """Return the different outputs of each class of a draw."""
    listed, outputs = drawn_of(case, seed)
    found: dict[str, set[str]] = {}
    for configuration, output in zip(listed, outputs, strict=True):
        made = predict(configuration)
        assert made.key, f"{configuration.label()}: {made.reason}"
        found.setdefault(made.key, set()).add(output)
    return found


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in range(1, 6))])
@pytest.mark.parametrize(
    "case", [pytest.param(n, marks=[pytest.mark.exhaustive] * (n in ("norm", "long_norm"))) for n in DRAWN]
)
def test_configurations_of_one_class_have_one_output(case: str, seed: int) -> None:
    found = outputs_by_class(case, seed)
    assert {key: len(outputs) for key, outputs in found.items()} == dict.fromkeys(found, 1)
    if seed == 0:
        assert len(found) < DRAWN[case].first  # classes that no two share would show nothing
        assert (len(set.union(*found.values())) > 1) == DRAWN[case].differs


@pytest.mark.parametrize(("case", "rule"), [("attention", "_deciding"), ("row_sum", "normal_order")])
def test_classes_that_are_too_coarse_are_seen(case: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(classes, rule, lambda *_: set[str]() if rule == "_deciding" else "any")
    monkeypatch.setattr(Compiled, "choices", "any")
    assert any(len(outputs) > 1 for outputs in outputs_by_class(case, 0).values())


def classes_of(calls: Any) -> list[str]:
    """Return the classes of the configurations of a recorded call, by letters in their order."""
    listed = configurations_of(Request(calls[0].schedule, hw="h200"), {})
    made = [predict(c) for c in listed]
    assert all(p.us for p in made), [p.reason for p in made]
    return list(lettered(made, range(len(made))).values())


def empty(*shape: int, fmt: str = "bfloat16") -> Any:
    return np.empty(shape, get_format(fmt).dtype)


def test_sums_that_cross_warps_are_apart_as_on_the_chip() -> None:
    """As an H200's hashes of a grouped decode (triton_h200.csv): 8 columns a warp, so that 32 keys cross 4 of 8."""
    keys_and_warps = [(32, 4), (32, 4), (32, 8), (64, 4), (64, 8), (32, 2), (16, 4)]
    stages = [2, 3, *(2 for _ in keys_and_warps[2:])]
    configs = [
        triton.Config({"BN": n}, num_warps=w, num_stages=s) for (n, w), s in zip(keys_and_warps, stages, strict=True)
    ]
    tensors = [empty(16, 64), empty(4, 256, 64), empty(4, 256, 64), empty(16, 4, 64, fmt="float32")]
    with npusim.record() as calls:
        tuned = triton.autotune(configs=configs, key=[])(class_kernels.grouped_decode)
        tuned[(4, 4)](*tensors, empty(16, 4, fmt="float32"), 0.125, 256, 64, G=4, D=64)
    assert classes_of(calls) == ["A", "A", "A", "B", "C", "D", "E"]


def test_products_that_are_contracted_otherwise_are_apart_as_on_the_chip() -> None:
    """As an H200's hashes of rotary positions in bfloat16: 1 and 2 warps load what others get from their neighbours."""
    with npusim.record() as calls:
        configs = [triton.Config({}, num_warps=w) for w in (1, 2, 4, 8, 16)]
        tuned = triton.autotune(configs=configs, key=[])(class_kernels.rotated)
        tuned[(64,)](empty(64, 32, 128), empty(64, 32, 128), empty(64, 64), empty(64, 64), H=32, D=128)
    assert classes_of(calls) == ["A", "A", "B", "B", "B"]


def test_rows_of_a_program_do_not_decide_cumulative_sums_as_on_the_chip() -> None:
    """As an H200's hashes of Mamba-2's cumulative sums: a lane has two elements of one row, four of more rows."""
    with npusim.record() as calls:
        configs = [triton.Config({"BH": n}) for n in (1, 2, 4, 8)]
        tuned = triton.autotune(configs=configs, key=[])(class_kernels.added_up)
        tuned[lambda c: (triton.cdiv(12, c["BH"]),)](
            empty(12, 256, fmt="float32"), empty(12, 256, fmt="float32"), 12, N=256
        )
    assert classes_of(calls) == ["A", "B", "B", "B"]


def test_a_class_is_unknown_where_an_order_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Compiled, "choices", UNKNOWN)
    with npusim.record() as calls:
        configs = [triton.Config({}, num_warps=w) for w in (4, 8)]
        tuned = triton.autotune(configs=configs, key=[])(class_kernels.rotated)
        tuned[(4,)](empty(4, 8, 64), empty(4, 8, 64), empty(4, 32), empty(4, 32), H=8, D=64)
    assert classes_of(calls) == ["?", "?"]


#: Outputs of an H200 (Triton 3.6, torch 2.11; MD5 of 8 tokens, 32 heads, the second half of 128) by format and warps.
ROTATED = {
    ("float32", 2): "abe0c85ba9ea895b95a3307f8e8ec17d",
    ("float32", 8): "032d45f3139de2b1c96c5abcb852253d",
    ("float16", 2): "868bb5dae7afa5b0808ca6ae6b6aecec",
    ("float16", 8): "db05e3de8558785eceaa8681ae264f09",
    ("bfloat16", 2): "66f4d1fd59ded696ffbeba166850f9eb",
    ("bfloat16", 8): "1f8abeeba300c1762a073c99b723c994",
}
#: Which of six configurations of the same chip had the first one's output: of 256 elements and of 4,096 a program with
#: 1, 4 and 8 warps.
JOINED = {"float32": (0, 1, 0, 0, 0, 0), "float16": (0, 1, 1, 0, 0, 0), "bfloat16": (0, 1, 1, 0, 0, 0)}


@pytest.mark.parametrize(("fmt", "warps"), in_turn([*JOINED], (2, 8)))
def test_a_run_contracts_what_the_compiled_code_does(fmt: str, warps: int) -> None:
    levels = {"float32": 1 << 20, "float16": 1 << 10, "bfloat16": 1 << 7}[fmt]

    def values(shape: tuple[int, ...], seed: int) -> Any:
        numbers = (np.arange(np.prod(shape), dtype=np.int64) * 7919 + seed) % (2 * levels - 1) - levels + 1
        return (numbers / (levels // 4)).astype(get_format(fmt).dtype).reshape(shape)

    tensors = values((8, 32, 128), 5), empty(8, 32, 128, fmt=fmt), values((8, 64), 77), values((8, 64), 991)
    with npusim.record(floats=True) as calls:
        class_kernels.rotated[(8,)](*tensors, H=32, D=128, num_warps=warps)
    result = npusim.run(calls[0], hw="h200", rows="all", heads="all")
    assert md5(np.ascontiguousarray(result.output).tobytes()).hexdigest() == ROTATED[fmt, warps]


@pytest.mark.parametrize("fmt", ["float32", pytest.param("float16", marks=pytest.mark.exhaustive), "bfloat16"])
def test_elements_of_a_thread_decide_what_is_contracted(fmt: str) -> None:
    with npusim.record() as calls:
        for block in (256, 4096):
            for warps in (1, 4, 8):
                tensors = empty(1 << 18, fmt=fmt), empty(1 << 18, fmt="float32")
                class_kernels.joined[(65536 // block,)](*tensors, B=block, num_warps=warps)
    texts = [(c.configurations[0].ttir, c.configurations[0].options) for c in calls]
    choices = [compiled_text(text, "sm_90", options).choices for text, options in texts]
    assert UNKNOWN not in choices
    assert tuple(int(x != choices[0]) for x in choices) == JOINED[fmt]
    assert len(set(choices)) == 2


def test_a_product_before_a_loop_is_rounded_before_the_loop_adds_it() -> None:
    from ttir.stored import stored

    rng = np.random.default_rng(0)
    calls: Any
    x, t = rng.standard_normal((4, 30)).astype(np.float32), (rng.standard_normal(4) * 30).astype(np.float32)
    words = {"X": x, "T": t, "Y": np.zeros_like(x), "Z": np.zeros_like(x)}
    with npusim.record(floats=True) as calls:
        class_kernels.beside_square[(4,)](**words, n=30, B=16)
    made = stored(npusim.run(calls[0], hw="h200", rows="all"), words)
    column = t[:, None]
    assert np.array_equal(made["Y"], x + column * column)  # two roundings
    wide = x.astype(np.float64)  # the product of two floats of 32 bits has all digits
    assert np.array_equal(made["Z"], (wide * wide + column).astype(np.float32))
