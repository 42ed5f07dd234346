"""A kernel's output with one choice changed on purpose: the choice is named, on silicon and on our own bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from npusim.config.problem import GemmProblem, Problem
from npusim.errors import SpecError, TensorError
from npusim.formats import get_format
from npusim.program.numerics.evaluate import named_choices
from npusim.program.numerics.input_tensors import recipe_source
from npusim.program.numerics.paths import compute
from npusim.report.findings import difference_table
from npusim.report.text import plain
from npusim.simulation.request import Request
from npusim.simulation.simulate import run_request
from npusim.studies.validate.diff import Difference, diff

pytestmark = pytest.mark.usefixtures("declared_tiles")

GOLDEN = Path(__file__).resolve().parents[3] / "shared" / "golden" / "attention_h200.npz"
HEXP = "exp_variant=exp.hopper_hexp"
FA3 = "fa3,fold=false"
#: Kernel, what is asked for in place of what it does, the choice that has to be named, and its operation.
CHANGED: tuple[tuple[str, dict[str, Any], str, str], ...] = (
    ("flash/normal_d128", {"precision": "exp_variant=exp.correct"}, "exp_variant=exp2.exp2p", "softmax S"),
    ("flash/normal_d128", {"precision": "sum_order=tree_halves"}, "sum_order=sequential", "softmax l_tile"),
    ("flash/normal_d128", {"precision": "accumulate=fresh"}, "accumulate=chained", "PV.mma T_in"),
    ("flash/normal_d128", {"precision": "scores=float16"}, "scores=float32", "S.mma"),
    ("flash/normal_d128", {"precision": "running=float16"}, "running=float32", "softmax rescale"),
    ("flash/normal_d128", {"tiling": {"block_kv": 128}}, "block_kv=64", "softmax m_tile"),
    ("pasa/uniform_20_20", {"precision": f"{HEXP},mean=float32"}, "mean=float16", "softmax S_wide"),
    ("pasa/uniform_20_20", {"precision": f"{HEXP},sum_order=sequential"}, "sum_order=tree_halves", "softmax mean"),
    ("fp8/sink7_s256_rev_chain", {"precision": f"{FA3},is_reverse=false"}, "is_reverse=True", "K.load k"),
    ("fp8/sink7_s256_rev_chain", {"precision": f"{FA3},accumulate=fresh"}, "accumulate=chained", "PV.mma T_in"),
    ("fp8/sink7_s256_rev_chain", {"precision": f"{FA3},scale=1.0"}, "scale=256.0", "softmax P_fp8"),
    ("fp8/sink7_s256_rev_chain", {"precision": "fa3"}, "fold=False", "softmax m_new"),
)
#: Schedule, format of the inputs, and the keys of a tile of each family of recorded kernels.
FAMILIES = {
    "flash": ("flash", "float16", 64),
    "pasa": ("pasa", "float16", 128),
    "fp8": ("fp8_attention", "float8_e4m3fn", 64),
}


def _silicon(name: str, **asked: Any) -> tuple[Any, Request]:
    """Return the first 64 rows of a recorded kernel's first head, and a request of their inputs."""
    if not GOLDEN.is_file():
        pytest.skip(f"{GOLDEN.name} of the golden vectors is not there")
    schedule, fmt, keys = FAMILIES[name.partition("/")[0]]
    asked = {**asked, "tiling": {"block_kv": keys, **asked.get("tiling", {})}}
    with np.load(GOLDEN) as archive:
        inputs = str(archive[f"{name}/inputs"])
        tensors = {n: archive[f"inputs/{inputs}/{n}"].view(get_format(fmt).dtype)[None, :1] for n in "qkv"}
        out = archive[f"{name}/o"][:1, :64]
        if f"{name}/beta" in archive.files:
            asked = {**asked, "tiling": {"beta": float(archive[f"{name}/beta"]), **asked["tiling"]}}
    tensors["q"] = tensors["q"][:, :, :64]
    return out, Request(schedule, hw="h200", tensors=tensors, rows="all", heads="all", causal=False, **asked)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "asked", "choice", "operation"), CHANGED)
def test_a_choice_of_a_silicon_kernel_that_was_changed_is_named(
    name: str, asked: dict[str, Any], choice: str, operation: str
) -> None:
    found = diff(*_silicon(name, **asked))
    assert found.matched < found.total == 64 * found.run.problem.value_head_dim
    assert found.passed
    named = {str(one): one for one in found.explained}
    assert choice in named
    # Others are equal on these inputs only where they mean the same: exp2 rounded correctly, or by its polynomial.
    assert {c.partition("=")[0] for c in named} == {choice.partition("=")[0]}
    assert f": {operation}, " in named[choice].parted


def test_a_silicon_kernel_as_it_is_has_no_difference() -> None:
    found = diff(*_silicon("flash/normal_d128"))
    assert (found.matched, found.first, found.tried, found.passed) == (found.total, None, 0, True)


# ---------------------------------------------------------------- on our own bits

SMALL: dict[str, Any] = {"seq_q": 16, "seq_kv": 96, "rows": "all", "heads": [0], "causal": False, "hw": "h200"}


def _ours(**changes: Any) -> Any:
    asked = Request("flash", **{**SMALL, "trace_groups": (), **changes})
    return np.nan_to_num(run_request(asked).output)


def _diff(out: Any, **changes: Any) -> Difference:
    return diff(out, Request("flash", **{**SMALL, **changes}))


def test_one_change_is_found_with_its_first_element_and_step() -> None:
    out = _ours(precision="scores=float16")
    found = _diff(out)
    assert [str(e) for e in found.explained] == ["scores=float16"]
    assert found.first is not None
    assert found.given == float(out[found.first])
    assert found.given != found.predicted
    assert ": S.mma" in found.explained[0].parted


@pytest.mark.exhaustive
def test_two_changes_are_found_as_a_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("npusim.studies.validate.diff.NEAREST", 1)
    found = _diff(_ours(precision="scores=float16", tiling={"block_kv": 32}))
    assert {frozenset(map(str, e.changes)) for e in found.explained} == {frozenset({"scores=float16", "block_kv=32"})}


def test_what_no_choice_explains_fails_and_names_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("npusim.studies.validate.diff.NEAREST", 1)
    out = _ours(precision="scores=float16")
    bits = out.view(np.uint16)
    bits[0, 0, 3, 5] ^= 1
    found = _diff(bits)  # bit patterns are as good as values
    assert not found.passed
    assert found.nearest is not None
    assert str(found.nearest).startswith("scores=float16")
    assert found.nearest.matched < found.nearest.of


def test_noise_has_no_nearest_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of noise's outputs are equal, whatever is changed: the best of all changes is so by chance."""
    monkeypatch.setattr("npusim.studies.validate.diff.NEAREST", 0)
    out = _ours().view(np.uint16)
    found = _diff(np.where(np.random.default_rng(0).random(out.shape) < 0.9, out ^ 1, out))
    assert not found.passed
    assert found.tried > 20
    assert found.nearest is None
    shown = plain(difference_table(Path("out.npz"), found))
    assert "no explanation: no change of a choice makes half of the differing outputs equal" in shown


def test_matrix_arithmetic_with_several_names_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ada's tensor core adds as Ampere's does: both names explain an output of either, from one computation."""
    names = {f"{maker}.mma.k16.f16.f32" for maker in ("ampere", "ada")}
    computed = []

    def recorded(program: Any, *more: Any) -> Any:
        computed.extend(names & named_choices(program)[0].keys())
        return compute(program, *more)

    monkeypatch.setattr("npusim.studies.validate.diff.compute", recorded)
    found = _diff(_ours(precision="arithmetic=ampere.mma.k16.f16.f32"))
    alike = [e for e in found.explained if str(e.changes[0].value) in names]
    assert {str(e) for e in alike} == {f"arithmetic={name}" for name in names}
    assert len({e.parted for e in alike}) == 1
    assert len(computed) == 1


def test_the_nearest_is_never_another_makers_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("npusim.studies.validate.diff.NEAREST", 0)
    bits = _ours(precision="arithmetic=volta.mma.k4.f16.f32").view(np.uint16)
    bits[0, 0, 3, 5] ^= 1
    found = _diff(bits)
    assert not found.explained
    assert found.nearest is None or "arithmetic=volta" not in str(found.nearest)


def test_bfloat16_bits_of_an_npz_are_taken_as_they_are(tmp_path: Path) -> None:
    changes = {"dtype": "bfloat16"}
    np.savez(tmp_path / "out.npz", o=np.nan_to_num(_ours(**changes)))
    assert _diff(tmp_path / "out.npz", **changes).passed  # type: ignore[arg-type]


def test_a_file_is_read_by_its_key_and_refused_by_shape_dtype_or_content(tmp_path: Path) -> None:
    out, file = _ours(), tmp_path / "out.npz"
    np.savez(file, o=out, other=np.ones(3))
    assert _diff(file).passed  # type: ignore[arg-type]
    np.savez(file, only=out[0])
    assert _diff(file).passed  # type: ignore[arg-type]
    for arrays, message in (
        ({"o": out[:, :, :8]}, r"shape \(1, 5, 8, 128\); this run's has \(1, 5, 16, 128\)"),
        ({"o": out.astype(np.float32)}, "the output is float32; this run's is float16, or its bit patterns as u2"),
        ({"a": out, "b": out}, "there is no key o, out, output; its keys are a, b"),
    ):
        np.savez(file, **arrays)
        with pytest.raises(TensorError, match=message):
            _diff(file)  # type: ignore[arg-type]
    file.write_bytes(b"PK")
    with pytest.raises(TensorError, match="not a readable tensor file, or truncated"):
        _diff(file)  # type: ignore[arg-type]
    with pytest.raises(TensorError, match="no such file"):
        _diff(tmp_path / "none.npz")  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="gemm computes no output of attention"):
        diff(out, Request("gemm", problem=GemmProblem(m=16, n=16, k=16)))


# ---------------------------------------------------------------- neighbouring problems

MASKED: dict[str, Any] = {"seq_q": 64, "seq_kv": 160, "rows": "all", "heads": "all", "hw": "h200"}


def _of(**changes: Any) -> Problem:
    sizes: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 64, "causal": True, "window": 40, "softcap": 2.0}
    return Problem(**{**sizes, **{n: MASKED[n] for n in ("seq_q", "seq_kv")}, **changes})


def _computed(problem: Problem) -> Any:
    return run_request(Request("flash", problem=problem, hw="h200", rows="all", heads="all", trace_groups=())).output


def _held(out: Any, problem: Problem) -> Difference:
    return diff(out, Request("flash", problem=problem, hw="h200", rows="all", heads="all"))


@pytest.mark.parametrize(
    ("asked", "change", "named"),
    [
        ({}, {"window": 41}, "window=41"),
        ({}, {"window": 39}, "window=39"),
        ({}, {"window": None}, "window=None"),
        ({"window": None}, {"causal": False}, "causal=False"),
        ({"window": None}, {"causal_offset": 0}, "causal_offset=0"),
        ({"window": None}, {"causal_offset": 97}, "causal_offset=97"),
        ({}, {"softcap": None}, "softcap=None"),
        ({}, {"scale": 1.0}, "scale left out"),
        ({}, {"scale": 1 / 64}, "scale twice"),
    ],
)
def test_a_neighbouring_problem_is_named_before_any_choice(
    asked: dict[str, Any], change: dict[str, Any], named: str
) -> None:
    found = _held(_computed(_of(**{**asked, **change})), _of(**asked))
    assert not found.passed
    assert found.problem is not None
    assert (found.problem.change, found.tried, found.explained) == (named, 0, ())
    assert found.problem.error < 1e-3 < found.problem.asked
    assert f"{named}: relative RMSE" in plain(difference_table(Path("out.npz"), found))


@pytest.mark.parametrize(("asked", "window"), [((20, 5), (20, 6)), ((-1, 5), (-1, 6)), ((20, -1), (19, -1))])
def test_sides_of_a_window_are_neighbours(asked: tuple[int, int], window: tuple[int, int]) -> None:
    found = _held(_computed(_of(causal=False, window=window)), _of(causal=False, window=asked))
    assert found.problem is not None
    assert found.problem.change == f"window={window}"


def test_heads_of_keys_are_neighbours() -> None:
    rng = np.random.default_rng(3)
    sizes = {"q": (1, 4, 64, 64), "k": (1, 2, 64, 64), "v": (1, 2, 64, 64)}
    tensors = {n: rng.standard_normal(s).astype(np.float16) for n, s in sizes.items()}
    whole = {"q": tensors["q"], **{n: np.tile(tensors[n], (1, 2, 1, 1)) for n in "kv"}}
    call: dict[str, Any] = {"hw": "h200", "rows": "all", "heads": "all", "causal": False}
    asked = Request("flash", tensors=whole, trace_groups=(), **call)
    found = diff(run_request(asked).output, Request("flash", tensors=tensors, **call))
    assert found.problem is not None
    assert found.problem.change == "heads of K and V interleaved (head % kv_heads)"


def test_a_choice_of_formats_is_no_other_problem() -> None:
    asked = Request("flash", **{**SMALL, "trace_groups": (), "window": (40, 5), "precision": "scores=float16"})
    found = _diff(run_request(asked).output, window=(40, 5))
    assert found.problem is None
    assert "scores=float16" in [str(e) for e in found.explained]


def _without_scores(problem: Problem, *, is_masked: bool) -> Any:
    """Return the mean of V over the keys that a query sees, or over all."""
    source = recipe_source(problem)
    seen = problem.seen.matrix(problem.causal_offset, problem.seq_q, 0, problem.seq_kv) | (not is_masked)
    means = [seen @ source("v", 0, h // problem.group_size).astype(float) for h in range(problem.heads)]
    return (np.array(means) / seen.sum(axis=1)[:, None]).astype(np.float16)[None]


@pytest.mark.parametrize(
    ("is_masked", "named"),
    [(True, "uniform weights (the mean of V)"), (False, "uniform weights of all keys (the mean of V)")],
)
def test_the_mean_of_v_is_named_as_such(is_masked: bool, named: str) -> None:
    problem = _of()
    found = _held(_without_scores(problem, is_masked=is_masked), problem)
    assert found.problem is not None
    assert found.problem.change == named
    assert found.problem.error < 1e-3


def test_zeros_are_named_as_such() -> None:
    found = _held(np.zeros((1, 4, 64, 64), np.float16), _of())
    assert (str(found.problem), found.tried) == ("zeros: relative RMSE 0 against float64 (requested problem: 1)", 0)


@pytest.mark.parametrize(("asked", "cap"), [(None, 2.0), (None, 0.75), (4.0, 1.5)])
def test_a_soft_cap_of_a_kernel_is_found_by_its_number(asked: float | None, cap: float) -> None:
    found = _held(_computed(_of(softcap=cap)), _of(softcap=asked))
    assert found.problem is not None
    assert (found.problem.change, found.tried) == (f"softcap={cap:g}", 0)
    assert found.problem.error < 1e-3


def test_a_neighbour_that_is_nearer_and_explains_nothing_is_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half way from the scale to its square the latter is nearer, by far more than rounding."""
    monkeypatch.setattr("npusim.studies.validate.diff.NEAREST", 0)
    asked = _of(softcap=None, window=None, heads=2)
    found = _held(_computed(_of(softcap=None, window=None, heads=2, scale=asked.scale**1.8)), asked)
    assert found.problem is None
    assert not found.passed
    assert found.tried > 20
