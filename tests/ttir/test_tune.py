"""`npusim tune` and what Triton's autotuner calls: times against a chip's, classes of bits against its hashes."""

from __future__ import annotations

import json
import re
import shlex
import warnings
from dataclasses import replace
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

import npusim
from npusim.cli.app import app
from npusim.config.problem import KernelProblem
from npusim.errors import SpecError, TilingError
from npusim.program.timing.timing_result import Limit
from npusim.simulation.ranking import Prediction, ranked
from npusim.simulation.request import Request
from npusim.studies.tune.configurations import configurations_of
from npusim.studies.tune.prediction import kept, lettered, predict_all

if TYPE_CHECKING:
    from collections.abc import Sequence

    from npusim.config.device import L2State

prune, perf_model = npusim.triton.prune, npusim.triton.perf_model
pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="npusim[triton] is not installed")
KERNELS = Path(__file__).parent / "tuned_kernels.py"
SOFTMAX = f"{KERNELS}::softmax[P](tensor(R, C).to('float32'), tensor(R, C).to('float32'), R, C)"
NORM = (
    f"{KERNELS}::rms_norm[R](tensor(R, C), tensor(R, C), tensor(C), tensor(R).to('float32'), C, 1e-6, "
    "BLOCK=next_power_of_2(C))"
)
PRODUCT = (
    f"{KERNELS.with_name('plain_kernels.py')}::matmul[cdiv(M, BM) * cdiv(N, BN)](tensor(M, K), tensor(K, N), "
    "tensor(M, N), M, N, K, BM=64, BN=64, BK=32, GROUP=8)"
)
#: Microseconds of an H100 by warps (1, 2, 4, 8, 16) and programs; graphs of launches, 1.3 us apart (tutorial 02's
#: softmax, 4096 x 1000 of float32).
SOFTMAX_US = {
    132: (58.3, 45.0, 40.4, 38.9, 40.3),
    264: (34.3, 28.1, 25.5, 25.0, 25.4),
    528: (21.0, 18.2, 17.1, 17.0, 17.5),
    1056: (15.0, 14.3, 14.0, 13.9, 16.7),
}
#: Microseconds of an H200 by programs and warps (2, 4, 8): 8192 x 2048, inputs and outputs rotating over 120 MB, torch
#: 2.11, Triton 3.6.
LONG_SOFTMAX_US = {132: (119.57, 101.70, 92.42), 264: (70.27, 61.16, 55.44), 1056: (37.68, 37.52, 37.45)}
#: As of the H100's softmax, a norm of 4096 x 4096 in float16, a block a row.
NORM_US = (25.8, 25.5, 25.1, 24.8, 24.8)
#: What L2 does with writes where a launch follows another.
THROUGH = {"memory.l2.writes": "through"}
#: The same of 256 rows of 5120. Their inputs are in L2: a copy of 2 MiB from memory takes an H100 1.8 us without its
#: launch (reports/silicon/dirty_h100.json), these norms of 2.5 MiB 1.5 to 1.8 us without the gap.
SHORT_NORM_US = (3.86, 3.12, 2.95, 2.86, 2.84)
GAP_US = 1.3


def request_of(launch: str, hw: str = "h100", l2: L2State = "steady", **sizes: int) -> Request:
    return Request(launch, hw=hw, problem=KernelProblem.of(sizes), l2=l2)


def test_row_kernels_are_met_and_ranked_as_on_the_chip() -> None:
    measured, predicted = list[float](), list[float]()
    for programs, times in SOFTMAX_US.items():
        made = predict_all(configurations_of(request_of(SOFTMAX, R=4096, C=1000, P=programs), {}))
        measured += times
        predicted += [(p.us or 0.0) + GAP_US for p in made]
    errors = [abs(p / m - 1) for p, m in zip(predicted, measured, strict=True)]
    assert median(errors) <= 0.06, errors
    assert max(errors) <= 0.12, errors
    assert measured[min(range(len(measured)), key=predicted.__getitem__)] <= 1.05 * min(measured)
    apart = [
        (measured[i] - measured[j]) * (predicted[i] - predicted[j]) > 0
        for i, j in combinations(range(len(measured)), 2)
        if max(measured[i], measured[j]) > 1.02 * min(measured[i], measured[j])
    ]
    assert 2 * sum(apart) / len(apart) - 1 >= 0.85  # Kendall's tau


def test_programs_that_go_on_to_further_rows_read_in_step() -> None:
    for programs, times in LONG_SOFTMAX_US.items():
        request = request_of(SOFTMAX, "h200", R=8192, C=2048, P=programs)
        made = predict_all(configurations_of(request, {"warps": (2, 4, 8)}))
        errors = [((p.us or 0.0) + GAP_US) / us - 1 for p, us in zip(made, times, strict=True)]
        assert max(map(abs, errors)) <= 0.13, (programs, errors)
        assert sum(errors) / len(errors) <= 0.02, (programs, errors)


def test_a_kernel_bound_by_memory_says_so_and_ties_go_to_more_warps() -> None:
    made = predict_all(configurations_of(request_of(NORM, R=4096, C=4096), {"warps": (1, 2, 4, 8, 16)}))
    assert all(abs(((p.us or 0.0) + GAP_US) / us - 1) <= 0.08 for p, us in zip(made, NORM_US, strict=True))
    assert {str(p.limit) for p in made} == {"hbm"}
    # The least time is that of one warp, which is no faster than others by more than the tie.
    assert NORM_US[ranked(made)[0]] <= 1.01 * min(NORM_US)
    # As the chip's hashes: each number of warps adds a row up in another order.
    assert len(set(lettered(made, ranked(made)).values())) == 5


def test_of_equal_rows_the_block_with_fewer_warps_is_first() -> None:
    """A softmax of 65,536 rows of 896: 58.1 us with 2 warps, 64.9 with 4, on an H200; as many are resident."""
    many, few = (
        Prediction(us, warps=64, limit=Limit("hbm", 0.95, is_link=True), block_warps=n)
        for us, n in ((57.8, 4), (57.9, 2))
    )
    assert ranked([many, few]) == [1, 0]
    assert ranked([replace(p, block_warps=0) for p in (many, few)]) == [0, 1]
    assert ranked([replace(p, limit=Limit("LSU", 0.95)) for p in (many, few)]) == [0, 1]


def test_rows_whose_inputs_are_in_l2_are_met() -> None:
    request = request_of(NORM, l2="repeated", R=256, C=5120)
    made = predict_all(configurations_of(request, {"warps": (1, 2, 4, 8, 16)}))
    errors = [abs(((p.us or 0.0) + GAP_US) / us - 1) for p, us in zip(made, SHORT_NORM_US, strict=True)]
    assert max(errors) <= 0.12, errors
    assert median(errors) <= 0.08, errors


def test_a_launch_that_another_follows_does_not_wait_for_its_last_stores() -> None:
    problem, hw = KernelProblem.of({"R": 256, "C": 5120}), "h100"
    alone = npusim.run(NORM, hw=hw, problem=problem, l2="clean", overrides=THROUGH, numerics=False).timing
    followed = npusim.run(NORM, hw=hw, problem=problem, l2="steady", numerics=False).timing
    assert alone is not None
    assert followed is not None
    assert followed.cycles < alone.cycles
    # It has stored all the same, and memory has no less to move: the lines that it evicts are as many as it writes.
    assert followed.link_bytes == pytest.approx(alone.link_bytes, rel=1e-3)
    assert followed.cycles >= max(followed.bound_cycles.values())


def test_classes_of_bits_of_products_and_attention_are_the_chips() -> None:
    ways: list[dict[str, tuple[int, ...]]] = [{"BM": (64, 128), "warps": (4, 8)}, {"BN": (64, 128), "BK": (32, 64)}]
    made = [p for axes in ways for p in predict_all(configurations_of(request_of(PRODUCT, M=512, N=512, K=512), axes))]
    assert {p.key for p in made} == {made[0].key}  # one hash of 72 configurations
    assert made[0].key
    attention = (
        f"{KERNELS.with_name('kernels.py')}::plain[seq_q // BM, batch * heads](q, k, v, o, scale * log2e, seq_kv, "
        "D=head_dim, BM=128, BN=64, CAUSAL=causal)"
    )
    request = Request(attention, hw="h100", seq=256, l2="steady")
    by_keys: dict[object, set[str]] = {}
    for axis, values in (("BM", (64, 128)), ("warps", (4, 8))):
        listed = configurations_of(request, {axis: values, "BN": (32, 64)})
        for configuration, p in zip(listed, predict_all(listed), strict=True):
            by_keys.setdefault(configuration.fields["BN"], set()).add(p.key)
    assert [len(keys) for keys in by_keys.values()] == [1, 1]
    assert by_keys[32] != by_keys[64]


def test_products_that_go_on_behind_copies_read_both_factors_from_shared_memory() -> None:
    tiling, sizes = {"warps": 4, "stages": 3}, KernelProblem.of({"M": 2112, "N": 1024, "K": 1024})
    launch = PRODUCT.replace("BM=64", "BM=128")
    timing = npusim.run(launch, hw="h100", problem=sizes, tiling=tiling, l2="steady", numerics=False).timing
    assert timing is not None
    # Tiles of 128 x 64 x 32: four instructions of 64 x 64 x 16 read 2 KiB of each factor; 12 KiB are copied.
    blocks, iterations, of_each = 17 * 16, 1024 // 32, (4 * (2048 + 2048) + 12 * 1024) / 128
    # What is left of the last one's goes on behind no copies.
    assert timing.bound_cycles["sm.LSU"] >= 0.98 * blocks * iterations * of_each / 132


def test_the_verb_takes_decorators_and_writes_picks(tmp_path: Path) -> None:
    words = ["tune", SOFTMAX, "--problem", "R=512,C=500", "--sizes", "P=132,264", "--hw", "h100", "-j1"]
    out = tmp_path / "picks.json"
    shown = CliRunner().invoke(app, [*words, "--bits", "same", "-o", str(out)])
    assert shown.exit_code == 0, shown.output
    picks = json.loads(out.read_text())
    assert [pick["shape"] for pick in picks] == ["P=132", "P=264"]
    # The class of the first configuration has one warp.
    assert [pick["fields"] for pick in picks] == [{"num_warps": 1, "num_stages": 3}] * 2
    assert "class A" in shown.stdout
    assert "\n  decorator  triton.Config({}, num_warps=1, num_stages=3)\n" in shown.stdout
    assert re.search(r"times of softmax \(no products\) on h100: half of\s+such predictions are within", shown.stdout)
    run = shlex.split(picks[0]["run"])
    assert run[1] == "run"
    assert run[-8:] == ["--hw", "h100", "-t", "num_warps=1", "-t", "num_stages=3", "--l2", "steady"]
    ran = CliRunner().invoke(app, [*run[1:], "--no-numerics", "--no-save", "--json"])
    assert ran.exit_code == 0, ran.output
    timing = json.loads(ran.stdout)["timing"]
    assert timing["latency_us"] - timing["launch_us"] == pytest.approx(picks[0]["us"])
    wrong = CliRunner().invoke(app, [*words, "--bits", "Z"])
    assert wrong.exit_code == 2
    assert "allowed: any, same, or a class: A" in wrong.output


def test_decorators_see_the_device_that_is_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "asking.py"
    file.write_text(
        DECORATED.replace("configs=[", "configs=unknown if unknown else [").replace(
            "@triton.autotune",
            "unknown = triton.runtime.driver.active.get_current_target().arch != 90\n\n\n@triton.autotune",
        )
    )
    launch = f"{file}::scaled[1](tensor(R).to('float32'), tensor(R).to('float32'))"
    assert [c.fields["num_warps"] for c in configurations_of(request_of(launch, R=64), {})] == [1, 2, 4]
    with pytest.raises(SpecError, match=r"configs cannot be evaluated here: .*; give -f"):
        configurations_of(request_of(launch, "a100", R=64), {})
    # With -f it is not needed.
    assert len(configurations_of(request_of(launch, "a100", R=64), {"BLOCK": (64,), "warps": (1, 2)})) == 2


def test_options_of_triton_have_triton_s_names_and_limits() -> None:
    """Tutorial 03's configurations have five stages: read from the decorator, in the launch, by ``-f``, recorded."""
    axes: list[dict[str, tuple[Any, ...]]] = [{"num_stages": (5,), "num_warps": (8,)}, {"stages": (5,), "warps": (8,)}]
    (one,), (other,) = (configurations_of(request_of(PRODUCT, M=256, N=256, K=256), x) for x in axes)
    assert one == other
    assert one.label() == "num_stages=5 num_warps=8"
    assert one.decorator == "triton.Config({}, num_stages=5, num_warps=8)"
    (made,) = predict_all([one])
    assert made.us, made.reason
    stated = configurations_of(
        request_of(PRODUCT.replace("GROUP=8", "GROUP=8, num_warps=8, num_stages=5"), M=256, N=256, K=256), {"BM": (32,)}
    )
    assert stated[0].decorator == "triton.Config({'BM': 32}, num_warps=8, num_stages=5)"
    beyond = predict_all(configurations_of(request_of(PRODUCT, M=256, N=256, K=256), {"num_stages": (17,)}))
    assert re.search(r"stages: 17.*16", beyond[0].reason), beyond[0].reason


def test_errors_are_those_of_measured_times_like_the_best_one() -> None:
    words = ["tune", "flash", "--hw", "h200", "-w", "llama3_8b", "--seq", "2048"]
    shown = CliRunner().invoke(
        app, [*words, "-f", "block_q=128", "-f", "stages=2", "-f", "num_warps=8", "-j1", "--json"]
    )
    assert shown.exit_code == 0, shown.output
    best = json.loads(shown.stdout)["shapes"][0]["best"]
    expected = r"from \d+ measured times of flash on h100 and h200: half of such predictions are within \d"
    assert re.match(expected, best["errors"]), best
    assert "decorator" not in best


def test_a_kernel_without_configurations_is_refused_by_name() -> None:
    with pytest.raises(SpecError, match=r"no @triton.autotune; use -f"):
        configurations_of(request_of(NORM, R=16, C=256), {})
    with pytest.raises(SpecError, match=r"a schedule has no list of configurations; name fields to rank: -f"):
        configurations_of(Request("flash"), {})


@pytest.mark.parametrize(
    ("schedule", "problem"), [(NORM, KernelProblem.of({"R": 8, "C": 256})), ("rows", None), ("pasa", None)]
)
def test_warps_are_powers_of_two(schedule: str, problem: KernelProblem | None) -> None:
    """As compilers lay a block out; attention by warps stacked down its rows takes any multiple of 4."""
    with pytest.raises(TilingError, match=r"warps: 12 is not a power of two; nearest: 8 or 16"):
        npusim.run(schedule, hw="h100", problem=problem, tiling={"warps": 12}, numerics=False)


# ---------------------------------------------------------------- Triton's own autotuner


class Block:
    """What of a tensor an autotuner and a launch look at."""

    def __init__(self, *shape: int, dtype: str = "torch.float32") -> None:
        self.shape, self.dtype = shape, dtype

    def stride(self) -> tuple[int, ...]:
        return (*self.shape[1:], 1)

    def is_contiguous(self) -> bool:
        return True


DECORATED = """
import triton
import triton.language as tl


@triton.autotune(
    configs=[triton.Config({"BLOCK": 64}, num_warps=w) for w in (1, 2, 4)],
    key=[],
)
@triton.jit
def scaled(X, Y, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(Y + at, tl.load(X + at) * 2.0)
"""


def refuse(*_: object, **__: object) -> Sequence[float]:
    raise AssertionError("measured")


class Launched:
    """A kernel that an autotuner launches: its configuration is noted, nothing runs."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.calls = kernel, list[dict[str, Any]]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernel, name)

    def run(self, *_: object, **options: Any) -> None:
        self.calls.append(options)


def tuner_of(name: str, **prune_by: Any) -> tuple[Any, Launched]:
    """Return Triton's autotuner of a kernel, whose driver refuses to measure."""
    import triton

    from npusim.kernels.triton.compiler import _content, _module

    path = str(KERNELS)
    launched = Launched(_module(path, _content(path)).__dict__[name])
    configs = [triton.Config({"BLOCK": 512}, num_warps=w) for w in (1, 2, 4, 8)]
    keys = [n for n in ("n_cols",) if n in launched.kernel.arg_names]
    tuner = triton.runtime.Autotuner(
        launched, launched.kernel.arg_names, configs, keys, None, None, do_bench=refuse, **prune_by
    )
    return tuner, launched


def call(tuner: Any, grid: object = (264,)) -> None:
    tuner.run(Block(512, 500), Block(512, 500), 512, 500, grid=grid, warmup=False)


def test_triton_takes_one_configuration_that_is_left_without_measuring() -> None:
    tuner, launched = tuner_of("softmax", prune_configs_by={"early_config_prune": prune("h100", top=1)})
    call(tuner)
    call(tuner, grid=lambda meta: (meta["BLOCK"] // 2,))  # known by its key
    assert [options["num_warps"] for options in launched.calls] == [tuner.best_config.num_warps] * 2
    assert "_bench" not in vars(tuner)
    with pytest.raises(AssertionError, match="measured"):
        call(tuner_of("softmax", prune_configs_by={"early_config_prune": prune("h100", top=2)})[0])


def test_bits_same_leaves_one_class_whatever_is_measured() -> None:
    tuner, _ = tuner_of("softmax")
    prune("h100", top=4, bits="same").bind(tuner)
    tuner.nargs = dict(zip(tuner.arg_names, (Block(512, 500), Block(512, 500), 512, 500), strict=False))
    left = tuner.prune_configs({"grid": (264,), "warmup": False})
    assert len(left) == 1  # each number of warps has an order of sums of its own
    with pytest.warns(UserWarning, match="differ in bits"):
        prune("h100", top=3).bind(tuner)
        assert len(tuner.prune_configs({"grid": (264,), "warmup": False})) == 3


def test_perf_model_ranks_for_top_k() -> None:
    tuner, _ = tuner_of("softmax", prune_configs_by={"perf_model": perf_model("h100"), "top_k": 2})
    tuner.nargs = dict(zip(tuner.arg_names, (Block(512, 500), Block(512, 500), 512, 500), strict=False))
    assert len(tuner.prune_configs({"grid": (264,), "warmup": False})) == 2


def test_a_configuration_that_is_not_predicted_stays_beside_the_best_of_the_others() -> None:
    import triton

    tuner, _ = tuner_of("softmax")
    tuner.configs = [*tuner.configs, triton.Config({"BLOCK": 512}, num_warps=4, num_ctas=2)]
    pruner = prune("h100", top=1).bind(tuner)
    named = dict(zip(tuner.arg_names, (Block(512, 500), Block(512, 500), 512, 500), strict=False))
    with pytest.warns(UserWarning, match="1 of 5 configurations have no prediction: num_ctas=2"):
        left = pruner(tuner.configs, named, grid=(264,), warmup=False)
    assert len(left) == 2
    assert left[1].num_ctas == 2
    tuner.nargs = named
    with pytest.warns(UserWarning, match="num_ctas=2"):
        times = [
            perf_model("h100").__self__.bind(tuner).perf_model(**named, grid=(264,), **c.all_kwargs())  # type: ignore[attr-defined]
            for c in tuner.configs[-2:]
        ]
    assert times[0] > 0.0
    assert times[1] == 0.0


def test_what_is_not_predicted_stays_and_nothing_is_raised() -> None:
    tuner, _ = tuner_of("gathered")
    pruner = prune("h100", top=1).bind(tuner)
    arguments = {"Out": Block(512), "In": Block(512), "At": Block(512, dtype="torch.int32")}
    with pytest.warns(UserWarning, match="tensor of int32"):
        assert pruner(tuner.configs, arguments, grid=(1,)) == tuner.configs
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        assert pruner(tuner.configs, arguments, grid=(1,)) == tuner.configs
    with pytest.warns(UserWarning, match="no kernel for these configurations"):
        assert prune("h100")(tuner.configs, arguments, grid=(1,)) == tuner.configs


def test_triton_compiles_nothing_that_a_hook_has_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decorated kernel of an imported file: Triton finds its code in its own cache, by its own key."""
    import triton
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("NPUSIM_CACHE", str(tmp_path / "npusim"))
    file = tmp_path / "decorated.py"
    file.write_text(DECORATED)
    spec = spec_from_file_location("decorated", file)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(module := module_from_spec(spec))
    tuner = module.scaled
    prune("h100", top=2, bits="any").bind(tuner)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert len(tuner.early_config_prune(tuner.configs, {"X": Block(64), "Y": Block(64)}, grid=(1,))) == 2
    found = list[bool]()
    monkeypatch.setattr(
        triton.knobs.compilation, "listener", lambda cache_hit, **_: found.append(cache_hit), raising=False
    )
    signature = {"X": "*fp32", "Y": "*fp32", "BLOCK": "constexpr"}
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(2)}
    for config in tuner.configs:
        written = ASTSource(tuner.fn, signature, {"BLOCK": config.kwargs["BLOCK"]}, aligned)
        options = {n: v for n, v in config.all_kwargs().items() if n in ("num_warps", "num_stages")}
        triton.compile(written, target=triton.backends.compiler.GPUTarget("cuda", 90, 32), options=options)
    assert found == [True] * len(tuner.configs)


def test_kept_names_the_classes_there_are() -> None:
    assert kept([], "any") == []
