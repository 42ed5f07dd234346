"""Schedules from outside the package: they run, are checked, and their faults are told with file and line."""

from __future__ import annotations

import ast
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import npusim
from npusim.cli.app import app
from npusim.cli.guide import guides
from npusim.config import outside
from npusim.config.load import load_device
from npusim.config.problem import GemmProblem, Problem
from npusim.config.tiling import build_tiling
from npusim.errors import NpusimError, SpecError, TensorError
from npusim.library import find_schedule, plugins
from npusim.program.ir.check import check
from npusim.program.ir.op import Opcode, Step
from npusim.program.ir.walk import Walker, walk
from npusim.program.numerics.evaluate import evaluate
from npusim.program.numerics.executor import execute
from npusim.program.numerics.input_tensors import recipe_source
from npusim.studies.baseline import check_baselines
from npusim.studies.explore import explore

pytestmark = pytest.mark.usefixtures("declared_tiles")

HERE = Path(__file__).parent
FILES = ("late_scale", "window", "matmul_gelu", "norm_product", "gelu_product", "linear_attention")
LATE, WINDOW, GELU, NORM, EXACT_GELU, _ = (f"{HERE / f'{name}.py'}:{name.upper()}" for name in FILES)
SIZES: dict[str, Any] = {"heads": 2, "kv_heads": 1, "seq_q": 150, "seq_kv": 200, "head_dim": 64, "causal": True}
SMALL = {"block_q": 64, "block_kv": 64}
FIELDS = {"v100": {}, "h200": {**SMALL, "stages": 2}}  # a compiled loop masks every tile, also where some are left out


@pytest.mark.parametrize("name", FILES)
def test_a_plugin_needs_the_public_surface_alone_and_few_lines(name: str) -> None:
    text = (HERE / f"{name}.py").read_text(encoding="utf-8")
    modules = {n.module for n in ast.walk(ast.parse(text)) if isinstance(n, ast.ImportFrom)}
    assert {m for m in modules if m and m.startswith("npusim")} == {"npusim.kernel"}
    assert sum(bool(line.strip()) for line in text.splitlines()) <= 40


@pytest.mark.parametrize("hw", ["ascend_910b2", "ascend_950", "h200", "v100"])
def test_an_exact_gelu_is_within_rounding_of_its_reference(hw: str) -> None:
    found = npusim.run(EXACT_GELU, hw=hw, problem=Problem(heads=2, seq_q=128, seq_kv=64, head_dim=64), rows="all")
    assert found.numerics.error.rmse < 1e-3
    assert found.cycles


@pytest.mark.parametrize("hw", ["ascend_910b2", "h200", "v100"])
def test_another_order_of_softmax_is_attention(hw: str) -> None:
    tiling = SMALL if hw != "v100" else {}  # whose blocks are as high as its warps
    found = npusim.run(LATE, hw=hw, problem=Problem(**SIZES), tiling=tiling, rows="all", trace_groups=())
    assert found.numerics is not None
    assert found.numerics.error.nan_count == 0
    assert found.numerics.error.rmse < 1e-3
    assert found.timing is not None
    plain = npusim.run("flash", hw=hw, problem=Problem(**SIZES), tiling=tiling, rows="all", trace_groups=())
    assert (found.output != plain.output).any()


@pytest.mark.parametrize("hw", ["ascend_910b2", "h200", "v100"])
def test_a_query_sees_its_window_and_nothing_else(hw: str) -> None:
    rng, window = np.random.default_rng(3), 70
    q, k, v = (rng.normal(size=(1, 1, 400, 64)).astype(np.float16) for _ in range(3))
    found = npusim.run(
        WINDOW,
        hw=hw,
        tensors={"q": q, "k": k, "v": v},
        causal=True,
        rows="all",
        trace_groups=(),
        tiling={**FIELDS.get(hw, SMALL), "window": window, "sinks": 3},
    )
    x, y = np.arange(400)[:, None], np.arange(400)[None]
    scores = q[0, 0].astype(float) @ k[0, 0].astype(float).T / 8
    scores[(y > x) | ((y <= x - window) & (y >= 3))] = -np.inf
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    expected = weights / weights.sum(axis=1, keepdims=True) @ v[0, 0].astype(float)
    got = found.output[0, 0].astype(float)
    assert np.linalg.norm(got - expected) / np.linalg.norm(expected) < 1e-3
    assert found.numerics.error.rmse < 1e-3, "errors are against the same mask"


USUAL = """
from math import inf
from npusim.kernel import *
@kernel(q="row head", k="key head", v="key value", mask="row key")
def f(q, k, v, mask, p, scale):
    m, l, o = full("row", -inf, p.softmax), full("row", 0.0, p.running), full("row value", 0.0, p.running)
    for kj, vj in tiles(k, v):
        s = where(mask, (q @ kj.T).to(p.scores).to(p.softmax) * scale, -inf)
        m_new = maximum(m, s.max())
        alpha = exp(m - m_new)
        shifted = s - m_new
        e = exp(shifted)
        l_tile = e.sum()
        w = e.to(p.operand)
        l = l * alpha + l_tile
        pv = (w @ vj).to(p.product)
        o = o * alpha + pv
        m = m_new
    return (o / l).to(p.output)
S = attention("s", f, precisions=[FlashPrecision("p", *["float32"] * 3, "input", "float32", "float32", "input")])
"""
SAME = {
    "P cast before it is added up": [
        (
            "        l_tile = e.sum()\n        w = e.to(p.operand)\n",
            "        w = e.to(p.operand)\n        l_tile = e.sum()\n",
        )
    ],
    "S read again behind its exponential": [
        ("        e = exp(shifted)\n", "        e = exp(s - m_new)\n"),
        ("e.sum()", "exp(shifted).sum()"),
    ],
    "O rescaled before the product": [
        (
            "        pv = (w @ vj).to(p.product)\n        o = o * alpha + pv\n",
            "        o = o * alpha + (w @ vj).to(p.product)\n",
        )
    ],
    "O rescaled first of all": [
        ("        shifted", "        o = o * alpha\n        shifted"),
        ("o = o * alpha + pv", "o = o + pv"),
    ],
    "m bound at once": [
        ("        m = m_new\n    return", "    return"),
        ("        shifted", "        m = m_new\n        shifted"),
    ],
}


@pytest.mark.parametrize("hw", ["h200", "a10", "t4", "v100", "ascend_910b2", "ascend_950"])
def test_what_is_written_is_what_is_computed(hw: str, tmp_path: Path) -> None:
    """Lines that compute the same have the same bits, whatever their order and however long a value is needed."""
    device, problem = load_device(hw), Problem(heads=1, seq_q=70, seq_kv=150, head_dim=64, causal=True)
    found = {}
    for what, changes in {"as usual": [], **SAME}.items():
        text = USUAL
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        (tmp_path / "same.py").write_text(text, encoding="utf-8")
        chosen = find_schedule(f"{tmp_path / 'same.py'}:S", device.family)
        tiling = build_tiling(chosen.tiling, {} if hw == "v100" else SMALL)
        program = chosen.program(problem, tiling, device, chosen.precision())
        check(program, device.flags)
        found[what] = evaluate(program, problem, recipe_source(problem), rows="all")
        outside._file.cache_clear()
    usual = found.pop("as usual")
    assert usual.error.rmse < 1e-3
    for what, other in found.items():
        assert np.array_equal(usual.output, other.output), what


@pytest.mark.parametrize("hw", ["ascend_910b2", "h200"])
def test_a_windows_traffic_is_that_of_the_tiles_it_meets(hw: str) -> None:
    """With sinks tiles in between are left out; neighbouring blocks share what both see; no row ends as 0 / 0."""
    sizes = {"problem": Problem(heads=2, seq_q=1024, head_dim=64, causal=True), "hw": hw, "trace_groups": ()}
    tiling = {"block_q": 64, "block_kv": 64}
    narrow = npusim.run(WINDOW, **sizes, tiling={**tiling, "window": 60, "sinks": 4}, rows="all")
    whole = npusim.run(WINDOW, **sizes, tiling={**tiling, "window": 1024}, rows="all")
    bare = npusim.run(WINDOW, **sizes, tiling={**tiling, "window": 20}, rows="all")
    assert narrow.timing.compulsory_bytes == whole.timing.compulsory_bytes, "every key is seen by some query"
    assert narrow.program.flops < whole.program.flops / 5, "operations are those of the keys in which are seen"
    assert narrow.cycles < whole.cycles
    for found in (narrow, whole, bare):
        assert found.numerics.error.rmse < 1e-3


@pytest.mark.parametrize("hw", ["ascend_910b2", "h200"])
def test_a_hook_sees_scores_whatever_the_precisions_exponential(hw: str, tmp_path: Path) -> None:
    """50 tanh(s / 50) is the same function in powers of two, of its own exponential too."""
    file = tmp_path / "cap.py"
    file.write_text(
        "from npusim.kernel import FlashPrecision, attention, exp, flash\n"
        "P = FlashPrecision('p', *['float32'] * 3, 'input', 'float32', 'float32', 'input')\n"
        "CAP = attention('cap', flash, precisions=[P], score=lambda s: 50 - 100 / (exp(s * (2 / 50)) + 1.0))\n",
        encoding="utf-8",
    )
    errors = [
        npusim.run(f"{file}:CAP", **{**LITTLE, "hw": hw}, precision=f"exp_variant={variant}")
        for variant in ("exp.correct", "exp2.correct")
    ]
    assert errors[0].numerics.error.rmse == pytest.approx(errors[1].numerics.error.rmse, rel=1e-2)
    assert "it does not include your function of scores" in errors[0].numerics.against


NUMBERS = """
from npusim.kernel import *
P = FlashPrecision("p", *["float32"] * 3, "input", "float32", "float32", "input")
def decayed(s, kj, rate):
    return s * per_tile(lambda i: rate**i, kj.index)
@kernel(q="row head", k="key head", v="key value", mask="row key")
def numbers(q, k, v, mask, p, scale):
    index, o, last = 4.0, full("row value", 0.0, p.running), full("row value", 0.0, p.running)
    for kj, vj in tiles(k, v):
        s = (q @ kj.T).to(p.scores) * scale
        s = decayed(s, kj, 0.5) + decayed(s, kj, 2.0) + kj.index * s * index
        pv = (s.to(p.operand) @ vj).to(p.product)
        last = o
        o = o + pv
    return (o + last).to(p.output)
def reference(q, k, v, problem, row, tiling):
    found, last = 0.0, 0.0
    for i, at in enumerate(range(0, len(k), tiling.block_kv)):
        last = found
        s = q @ k[at : at + tiling.block_kv].T * problem.scale * (0.5**i + 2.0**i + 4 * i)
        found = found + s @ v[at : at + tiling.block_kv]
    return found + last
NUMBERS = attention("numbers", numbers, precisions=[P], reference=reference)
"""


@pytest.mark.parametrize("hw", ["ascend_910b2", "h200"])
def test_numbers_of_tiles_and_states_that_hold_one_another_are_told_apart(hw: str, tmp_path: Path) -> None:
    """Two functions of one name, a constant called as a tile's number, and a state that lags behind another."""
    file = tmp_path / "numbers.py"
    file.write_text(NUMBERS, encoding="utf-8")
    problem = Problem(heads=1, seq_q=96, seq_kv=160, head_dim=64)
    found = npusim.run(
        f"{file}:NUMBERS", hw=hw, problem=problem, tiling={"block_q": 64, "block_kv": 32}, rows="all", trace_groups=()
    )
    assert found.numerics.error.rmse < 1e-3


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            "operands={'out': lambda problem: 0}, score=lambda s, out: s + out",
            "operand 'out' has a name that the kernel uses",
        ),
        ("fields=Own", "field 'kernel' is a field of a machine"),
        (
            "operands={'b': lambda problem: np.ones((3, 4, 4))}, score=lambda s, b: s + b",
            "operand b has shape (3, 4, 4)",
        ),
        ("sees=lambda problem, tiling: lambda q, k: k < q - 100", "sees: query 0 sees no key"),
    ],
)
def test_hooks_that_cannot_be_are_refused_in_words(more: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "hook.py"
    file.write_text(
        "import numpy as np\nfrom npusim.kernel import Field, FlashPrecision, Tiling, attention, flash\n"
        "P = FlashPrecision('p', *['float32'] * 3, 'input', 'float32', 'float32', 'input')\n"
        f"class Own(Tiling):\n    kernel: int = Field(default=3)\nS = attention('s', flash, precisions=[P], {more})\n",
        encoding="utf-8",
    )
    with pytest.raises(NpusimError, match=re.escape(message)):
        npusim.run(f"{file}:S", problem=Problem(**SIZES), tiling=SMALL, numerics=False)


@pytest.mark.parametrize("hw", ["ascend_910b2", "ascend_950", "h200", "v100"])
def test_a_norm_before_a_product_has_the_same_bits_on_every_family(hw: str) -> None:
    """V holds the weights, here of one element a column: neither row sums nor products hang on an order."""
    q = np.random.default_rng(5).integers(-9, 10, (1, 2, 128, 64)).astype(np.float16)
    v = np.broadcast_to(np.eye(64, dtype=np.float16), (1, 2, 64, 64))
    k = np.random.default_rng(6).integers(-4, 5, v.shape).astype(np.float16)  # its first row: gains
    tensors = {"q": q, "k": k, "v": v}
    result = npusim.run(NORM, hw=hw, tensors=tensors, causal=False, rows="all", trace_groups=())
    assert result.numerics is not None
    assert result.numerics.error.rmse < 5e-4
    mean = (q.astype(np.float32) ** 2).sum(-1) / np.float32(64) + np.float32(1e-6)
    root = np.array([float(1 / Decimal(float(m)).sqrt()) for m in mean.flat], np.float32).reshape(mean.shape)
    expected = (q * root[..., None] * k[:, :, :1]).astype(np.float16)
    assert np.array_equal(result.output.reshape(q.shape), expected)


@pytest.mark.parametrize("hw", ["ascend_910b2", "ascend_950", "h200", "v100"])
def test_a_square_root_is_correctly_rounded_on_every_family(hw: str) -> None:
    """Rows of Q are one number r each, so that r / sqrt(r^2 + epsilon) is known; V holds 1 on its diagonal."""
    r = np.arange(128, dtype=np.float16)
    q = np.broadcast_to(r[:, None], (1, 2, 128, 64)).astype(np.float16)
    tensors = {"q": q, "k": np.ones((1, 2, 64, 64), np.float16), "v": np.broadcast_to(np.eye(64), (1, 2, 64, 64))}
    tensors["v"] = tensors["v"].astype(np.float16)
    result = npusim.run(
        NORM.replace("NORM_", "ROOT_"), hw=hw, tensors=tensors, rows="all", trace_groups=(), causal=False
    )
    mean = r.astype(np.float32) ** 2 + np.float32(1e-6)
    root = np.array([float(Decimal(float(m)).sqrt()) for m in mean], np.float32)
    expected = (r.astype(np.float32) / root).astype(np.float16)
    assert np.array_equal(result.output[0, 1], np.broadcast_to(expected[:, None], (128, 64)))


def test_a_product_with_gelu_is_no_attention_and_right() -> None:
    device, schedule = load_device("ascend_910b2"), find_schedule(GELU, "ascend")
    problem = GemmProblem(m=200, n=300, k=130)
    program = schedule.program(problem, build_tiling(schedule.tiling, {}), device, schedule.precision("float32"))
    check(program, device.flags)
    rng = np.random.default_rng(0)
    given = {n: rng.normal(size=(t.rows, t.cols)).astype(np.float16) for n, t in program.tensors.items() if n != "c"}
    done = execute(program, lambda name, _b, _h: given[name])
    c = given["a"].astype(float) @ given["b"].astype(float)
    expected = c / (1 + np.exp(-1.702 * c))
    got = np.asarray(done.tensors.head(program.tensors["c"], 0, 0), float)
    assert np.linalg.norm(got - expected) / np.linalg.norm(expected) < 1e-6


def test_gelu_takes_what_was_published_for_8192_cubed() -> None:
    """V5 of ascend_more.md: 3,770 us between the pipes' own times, task 4,237; nothing tuned to it."""
    found = npusim.run(GELU, problem=GemmProblem(m=8192, n=8192, k=8192), numerics=False, trace_groups=())
    assert 0.85 < found.latency_us / 3770 < 1.15


def test_plugins_are_explored_in_other_processes_too() -> None:
    found = explore(LATE, {"block_kv": (64, 128)}, problem=Problem(**SIZES), jobs=2)
    assert len(found.feasible) == 2


# ---------------------------------------------------------------- faults

HEAD = """from npusim.kernel import *
from dataclasses import replace
P = FlashPrecision("p", *["float32"] * 3, "float16", "float32", "float32", "float16")
def usual(problem, tiling, p, machine):
    sizes, io = (tiling.block_q, tiling.block_kv), attention_tensors(problem, "float16")
    spans = {"row": sizes[0], "key": sizes[1], "head": problem.head_dim, "value": problem.value_head_dim}
    cells = attention_cells(problem, *sizes)
    return [flash.phase("attention", cells, spans, [io.o], q=io.q, k=io.k, v=io.v, mask=None, p=p, scale=1.0)]
"""


#: A builder of one's own whose consumers do not wait for their slots.
DROPPED = """from npusim.program.ir import tile, tile_program as ir
def strip(items):
    for item in items:
        if isinstance(item, ir.Loop):
            yield replace(item, body=lambda n, body=item.body: strip(body(n)))
        else:
            yield replace(item, steps=tuple(replace(s, srcs=tuple(late(x) for x in s.srcs)) for s in item.steps))
def late(source):
    return replace(source, first=False) if isinstance(source, tile.RingTile) else source
(T,) = schedule("s", usual, precisions=[P], families=["ascend"])
def build(*arguments):
    program = T.build(*arguments)
    return replace(program, phases=tuple(replace(p, body=lambda b, p=p: strip(p.body(b))) for p in program.phases))
S = replace(T, build=build, origin="")
"""


def faulty(tmp_path: Path, body: str) -> str:
    file = tmp_path / "mine.py"
    file.write_text(HEAD + body, encoding="utf-8")
    return f"{file}:S"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("S = (", r"mine\.py:\d+: SyntaxError"),
        ("import no_such_package\n", r"mine\.py:9: ModuleNotFoundError: No module named 'no_such_package'"),
        ("T = schedule('t', usual, precisions=[P])\n", r"mine\.py: no 'S'; allowed: T"),
        (
            "def wrong(q, k, v):\n    return q\n\n\nS = schedule('s', usual, precisions=[P], reference=wrong)\n",
            r"schedule s: reference: wrong\(q, k, v\), but npusim calls it with 6: q, k, v, problem, row, tiling",
        ),
        (
            "S = schedule('s', usual, precisions=[P], models=('softcab',))\n",
            r"schedule s: models: unknown 'softcab'\. Did you mean `softcap`\? Allowed: window, chunk, softcap,",
        ),
        ("S = 3\n", r"mine\.py: S is a int, not a result of attention\(\) or schedule\(\)"),
        ("S = schedule('s', usual, precisions=[])\n", r"mine\.py:9: schedule s: it needs at least one precision"),
        (
            "def f(problem, tiling, p, machine):\n    return [1 / 0]\nS = schedule('s', f, precisions=[P])\n",
            r"mine\.py:10: ZeroDivisionError",
        ),
        (
            "def f(problem, tiling, p, machine):\n    (u,) = usual(problem, tiling, p, machine)\n"
            "    def late(tile):\n        return {'scale': 1.0 if tile.index > 3 else 2.0}\n"
            "    return [replace(u, per_tile=late)]\nS = schedule('s', f, precisions=[P])\n",
            r"mine\.py:12: the body compares .*varying\(\)",
        ),
        (
            "S = schedule('s', usual, precisions=[replace(P, accumulate='chained')])\n",
            r"mine\.py:4: accumulate=chained: .* ascend_910b2 has no route from UB to L0C; its routes: GM to L1,",
        ),
        (
            "def build(problem, tiling, device, precision):\n    return 1 / 0\n"
            "(T,) = schedule('s', usual, precisions=[P], families=['ascend'])\nS = replace(T, build=build)\n",
            r"mine\.py:10: ZeroDivisionError",
        ),
        ("import sys\nsys.exit(0)\n", r"mine\.py:10: SystemExit: 0"),
        ("raise BaseException('of no kind')\n", r"mine\.py:9: BaseException: of no kind"),
        (
            "class Stop(BaseException): ...\ndef f(problem, tiling, p, machine):\n    raise Stop('here')\n"
            "S = schedule('s', f, precisions=[P])\n",
            r"mine\.py:11: Stop: here",
        ),
        (
            "import sys\ndef f(problem, tiling, p, machine):\n    sys.exit(0)\nS = schedule('s', f, precisions=[P])\n",
            r"mine\.py:11: SystemExit: 0",
        ),
        ("S = schedule('../../escape', usual, precisions=[P])\n", r"mine\.py:9: schedule '\.\./\.\./escape' has '/'"),
        (DROPPED, r"mine\.py:15: S\.load_right on aic\.MTE1 \(key=0\) reads bytes .* and no flag orders them"),
    ],
    ids=[
        "syntax",
        "import",
        "name",
        "reference",
        "models",
        "kind",
        "no schedule and preset",
        "error",
        "index",
        "route",
        "builder",
        "exit on import",
        "base exception on import",
        "base exception",
        "exit",
        "name of a folder",
        "dropped wait",
    ],
)
def test_a_faulty_plugin_is_told_with_its_file_and_line(tmp_path: Path, body: str, message: str) -> None:
    with pytest.raises(NpusimError, match=message):
        npusim.run(faulty(tmp_path, body), problem=Problem(heads=1, seq_q=64, seq_kv=256, head_dim=64), numerics=False)


def test_on_the_command_line_a_fault_is_bad_input(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["run", faulty(tmp_path, "import no_such_package\n"), "--seq", "64"])
    assert result.exit_code == 2
    assert "mine.py:9: ModuleNotFoundError" in re.sub(r"\n\s*", " ", result.output + str(result.stderr))


def test_a_missing_file_is_refused_with_the_form() -> None:
    with pytest.raises(SpecError, match=r"nowhere\.py: no such file; a schedule of your own is FILE\.py:NAME"):
        npusim.run("nowhere.py:X")


def test_entry_points_are_found_by_name_and_may_not_take_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "offered", lambda: {"late": LATE, "flash": LATE})
    assert re.search(rf"^  late +{re.escape(LATE)}$", str(CliRunner().invoke(app, ["run"]).stderr), re.MULTILINE)
    assert find_schedule("late", "ascend").name == "late_scale"
    assert {s.family for s in plugins.load(LATE)} >= {"ascend", "nvidia"}
    with pytest.raises(SpecError, match=r"'flash' is a packaged schedule; rename the entry point"):
        find_schedule("flash", "ascend")


# ---------------------------------------------------------------- attention without softmax

#: The guide's example.
TEXT = re.search(r"<!-- file: sigmoid\.py -->\n```python\n(.*?)```", guides()["schedule"], re.DOTALL)


def changed(tmp_path: Path, *changes: tuple[str, str]) -> str:
    """Return the sigmoid's schedule with some of its text replaced."""
    assert TEXT
    text = TEXT[1]
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    file = tmp_path / "sigmoid.py"
    file.write_text(text, encoding="utf-8")
    return f"{file}:SIGMOID_ATTENTION"


@pytest.fixture(scope="module")
def sigmoid(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Attention without softmax, as the guide has it."""
    return changed(tmp_path_factory.mktemp("guide"))


def test_errors_are_against_what_the_schedule_computes(sigmoid: str, tmp_path: Path) -> None:
    own = npusim.run(sigmoid, problem=Problem(**SIZES), tiling=SMALL, rows="all", trace_groups=())
    assert own.numerics.error.rmse < 1e-3
    assert "against reference() in float64 on all 300 rows" in str(own)
    path = changed(tmp_path, (", reference=reference", ""))
    none = npusim.run(path, problem=Problem(**SIZES), tiling=SMALL, rows="all", trace_groups=())
    assert none.numerics.error.rmse > 0.1
    assert "against softmax(QK^T)V in float64 on all 300 rows" in str(none)
    assert (none.output == own.output).all()


def test_a_search_rejects_by_the_schedules_own_error(sigmoid: str) -> None:
    found = explore(sigmoid, {"block_kv": (64, 128)}, problem=Problem(**SIZES), jobs=2, max_rmse=1e-3)
    assert found.counts() == {"ok": 2}


def test_a_reference_of_another_shape_is_refused(tmp_path: Path) -> None:
    path = changed(tmp_path, ("row))) @ v", "row))) @ v[:, :3]"))
    with pytest.raises(SpecError, match=r"sigmoid\.py:\d+: reference: returned shape \(\d+, 3\), wanted \(rows, dv\)"):
        npusim.run(path, problem=Problem(**SIZES), tiling=SMALL)


LITTLE: dict[str, Any] = {"problem": Problem(**SIZES), "tiling": SMALL, "trace_groups": (), "rows": "all"}
TIMED = {**LITTLE, "rows": "sample", "numerics": False}


def test_the_arithmetic_that_is_asked_for_is_computed(sigmoid: str) -> None:
    asked = npusim.run(sigmoid, **LITTLE, arithmetic="ascend.cube_fma.k16.f16.f32")
    assert set(asked.numerics.arithmetic) == {"ascend.cube_fma.k16.f16.f32"}
    assert set(npusim.run(sigmoid, **LITTLE).numerics.arithmetic) == {"ascend.cube.k16.f16.f32"}


def test_a_power_of_two_is_refused_where_scores_are_not_times_log2_e(sigmoid: str, tmp_path: Path) -> None:
    own = npusim.run(sigmoid, **LITTLE, precision="exp_variant=exp2.correct")
    assert own.numerics.error.rmse < 1e-3
    assert {s.attributes.variant for s in exponentials(sigmoid, "exp_variant=exp2.correct")} == {"exp2.correct"}
    path = changed(tmp_path, (" * -scale + log_keys", ""), ("scale, log_keys)", "log_keys)"))
    with pytest.raises(SpecError, match=r"exp_variant=exp2\.correct computes 2\^x.*scale"):
        npusim.run(path, **LITTLE, precision="exp_variant=exp2.correct")


def exponentials(path: str, precision: str) -> list[Step]:
    """Return the exponentials of a schedule's program."""
    program = npusim.run(path, **TIMED, precision=precision).program
    body = program.phases[0].body(program.phases[0].blocks[0])
    return [s for found in walk(Walker(program), body) for s in found.op.steps if s.opcode is Opcode.EXP]


def test_a_file_imports_what_lies_beside_it_and_a_hook_needs_its_parameter(tmp_path: Path) -> None:
    text = (HERE / "late_scale.py").read_text(encoding="utf-8")
    (tmp_path / "kept_beside.py").write_text(text, encoding="utf-8")
    lines = "from npusim.kernel import attention\nfrom kept_beside import FP32, late_scale\n\nLATE = "
    call = "attention('late', late_scale, precisions=[FP32]"
    (tmp_path / "one.py").write_text(f"{lines}{call})\n", encoding="utf-8")
    (tmp_path / "two.py").write_text(f"{lines}{call}, score=lambda s: s)\n", encoding="utf-8")
    problem = Problem(heads=1, seq_q=64, seq_kv=64, head_dim=64)
    assert npusim.run(f"{tmp_path}/one.py:LATE", problem=problem, numerics=False).cycles > 0
    with pytest.raises(
        SpecError, match=r"two\.py:4: .*kept_beside\.py:\d+: late_scale: it has no parameter `score`: add it"
    ):
        npusim.run(f"{tmp_path}/two.py:LATE", problem=problem, numerics=False)


def test_a_file_needs_a_name_unless_it_has_one_schedule(sigmoid: str, tmp_path: Path) -> None:
    file = sigmoid.partition(":")[0]
    done = CliRunner().invoke(app, ["run", file, "--seq", "256", "--no-numerics", "--no-save"])
    assert done.exit_code == 0, done.stderr
    assert f"{file} has one schedule, sigmoid\n" in done.stderr
    assert npusim.run(file, **TIMED).cycles == npusim.run(sigmoid, **TIMED).cycles
    two = tmp_path / "two.py"
    two.write_text(f"{Path(file).read_text(encoding='utf-8')}\n\nOTHER = SIGMOID_ATTENTION\n", encoding="utf-8")
    with pytest.raises(SpecError, match=r"two\.py: add :NAME; its schedules are SIGMOID_ATTENTION, OTHER$"):
        npusim.run(str(two))


def test_a_baselines_schedule_lies_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    changed(tmp_path)
    case = "schema: npusim.baseline/1\nschedule: {}\nhw: ascend_910b2\nworkload: pangu_38b\nseq: 256\n"
    (tmp_path / "own.yaml").write_text(case.format("sigmoid.py:SIGMOID_ATTENTION"))
    (outcome,) = check_baselines(tmp_path, update=True)
    assert outcome.status == "updated"
    (tmp_path / "own.yaml").write_text(case.format("no/where.py:S"))
    (outcome,) = check_baselines(tmp_path)
    assert outcome.reason.startswith(f"{tmp_path}/no/where.py: no such file")


def test_a_search_that_rejects_all_says_by_what(sigmoid: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["explore", sigmoid, "-f", "block_kv=64,128", "--seq", "128", "--max-rmse", "1e-9", "-j1"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2
    assert "no point is left: 2 rejected by --max-rmse; " in " ".join(done.stderr.split())


def test_every_operation_says_what_it_reads_and_computes() -> None:
    assert Opcode.__doc__
    told = re.findall(r"^ +([A-Z_]+)(?: [\w.]+,?)*: ", Opcode.__doc__, re.MULTILINE)
    assert told == [o.name for o in Opcode]


def test_a_comparison_says_what_errors_are_against(sigmoid: str) -> None:
    done = CliRunner().invoke(app, ["compare", "flash", sigmoid, "--seq", "128"])
    assert re.search(r"errors against +.* reference\(\) in float64", done.stdout)


TWICE = """
from npusim.kernel import *


@kernel(results="o", x="row col")
def twice(x):
    return x + x


def phases(problem, tiling, p, machine):
    x, o = (GlobalTensor(n, 1, 1, 64, 64, "float16", r) for n, r in (("x", "input"), ("o", "output")))
    return [twice.phase("twice", grid(o, ("row", 64)), {"row": 64, "col": 64}, [o], x=x)]


def reference(problem, output, inputs, tiling):
    return 2 * inputs("x", 0, 0)[None, None]


S = schedule("twice", phases, precisions=[FlashPrecision("stored")], families=["ascend"], PROBLEM)
"""


def test_a_plain_kernel_without_a_float64_result_is_refused_with_what_it_needs(tmp_path: Path) -> None:
    def named(problem: str) -> str:
        file = tmp_path / f"s{len(problem)}.py"
        file.write_text(TWICE.replace("PROBLEM", problem))
        return f"{file}:S"

    own = "problem=KernelProblem, sizes={'rows': 64}"
    call: dict[str, Any] = {"problem": {"rows": 64}, "hw": "ascend_910b2", "trace_groups": ()}
    with pytest.raises(SpecError, match=r"s\d+\.py:\d+: schedule twice has no float64 result.*reference="):
        npusim.run(named(own), **call)
    assert npusim.run(named(own), numerics=False, **call).latency_us > 0
    assert npusim.run(named(f"{own}, reference=reference"), **call).numerics.error.rmse == 0
    with pytest.raises(TensorError, match=r"input x: the inputs of attention are q, k, v.*problem=KernelProblem"):
        npusim.run(
            named("reference=lambda q, k, v, problem, row, tiling: q"),
            hw="ascend_910b2",
            problem=Problem(**SIZES),
            trace_groups=(),
        )
