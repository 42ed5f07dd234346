"""What changes the bits of a call: found, named, priced; and structure that promises bits keeps its promise."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from typer.testing import CliRunner

import npusim
from npusim.cli.app import app
from npusim.config.load import load_device
from npusim.config.problem import KernelProblem, Problem
from npusim.config.tiling import build_tiling
from npusim.errors import SpecError
from npusim.library import find_schedule
from npusim.program.numerics.evaluate import needed_blocks
from npusim.program.numerics.input_tensors import recipe_source
from npusim.program.numerics.paths import Computed, Place, compute
from npusim.simulation import variants
from npusim.simulation.chosen_tile import choose_tile
from npusim.simulation.plan import plan_of
from npusim.simulation.request import Request
from npusim.simulation.variants import row_key, row_steps
from npusim.studies.invariance import ASPECTS, examination
from reports.parts.kernel import declared_tiling as declared
from tests.turns import every, in_turn

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from npusim.program.ir.tile_program import ProgramPhase, TileProgram
    from npusim.simulation.run_result import RunData

DECODE = Problem(heads=3, kv_heads=1, seq_q=1, seq_kv=150, head_dim=32)
FIELDS: dict[str, Any] = {"block_q": 32, "block_kv": 32}
#: A kernel that merges one sequence's splits in line and those of several in pairs.
PLANTED = """
from dataclasses import replace
from npusim.library import find_schedule

ASCEND = find_schedule("split_kv", "ascend")


def build(problem, tiling, device, precision):
    merge = "tree" if problem.batch > 1 else "sequential"
    return ASCEND.build(problem, tiling.model_copy(update={"merge": merge}), device, precision)


KERNEL = replace(ASCEND, name="planted", build=build)
"""


def call(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["invariant", *words])
    return done.exit_code, done.output


def test_splits_by_number_of_blocks_change_bits_and_fixed_ones_do_not() -> None:
    vary = ["batch", "position", "splits"]
    long = DECODE.model_copy(update={"seq_kv": 1600})  # fewer keys are not split: a second kernel takes longer
    free = npusim.invariant("split_kv", problem=long, tiling=FIELDS, vary=vary)
    assert [f.aspect for f in free.findings] == sorted([*vary, "choice"], key=ASPECTS.index)
    assert [f.verdict for f in free.findings] == ["changes", "cannot", "changes", "changes"]
    assert free["choice"].guarantee == "splits=10"  # the tile is named, the number of splits is chosen for each call
    fixed = npusim.invariant("split_kv", problem=DECODE, tiling={**FIELDS, "splits": 3}, vary=["batch", "packing"])
    assert [f.verdict for f in fixed.findings] == ["cannot", "cannot", "cannot"]
    assert free["batch"].guarantee == "splits=10"
    one, batch = free["splits"], free["batch"]
    assert one.guarantee == "splits=1"
    assert one.cost_us is not None
    assert batch.cost_us is not None
    times = {t.what: t.latency_us for t in one.tried}
    assert one.cost_us == pytest.approx(times["splits=1"] - free.base.latency_us)
    named = declared("split_kv", "h200", **FIELDS)  # no tile is tried
    gpu = npusim.invariant("split_kv", problem=long, hw="h200", tiling=named, vary=["splits"])["splits"]
    assert (gpu.verdict, gpu.guarantee) == ("changes", "splits=1")
    with pytest.raises(SpecError, match=r"aspect 'pack': the examined aspects are batch, position"):
        free.holds("pack")


def test_what_is_tried_is_what_a_run_of_these_fields_is() -> None:
    """qwen2_7b, one query on 2k keys: the call's own slices have 8 rows, with block_kv=256 they have 16.

    What a run chose for itself stays as it is: the same kernel, called with something else.
    """
    sizes: dict[str, Any] = {"workload": "qwen2_7b", "seq_q": 1, "seq_kv": 2048}
    chosen = choose_tile(plan_of(Request("split_kv", **sizes))).fields
    tried = npusim.invariant("split_kv", **sizes, vary=["tile", "splits"])
    for one in (t for f in tried.findings for t in f.tried if not t.reason):
        name, _, value = one.what.partition("=")
        tiling = build_tiling(find_schedule("split_kv", "ascend").tiling, {**chosen, name: int(value)})
        run = npusim.run("split_kv", **sizes, tiling=tiling, numerics=False, trace_groups=())
        assert run.latency_us == one.latency_us, one.what


def test_a_planted_change_of_order_is_found_and_named(tmp_path: Path) -> None:
    file = tmp_path / "planted.py"
    file.write_text(PLANTED)
    words = (f"{file}:KERNEL", "--seq-q", "1", "--seq-kv", "150", "-t", "splits=4,block_kv=32")
    code, text = call(*words, "--precision", "output=float32", "--require", "batch,position", "--json")
    found = json.loads(text[text.index("{") : text.rindex("}") + 1])
    assert code == 1
    assert found["required"] == {"batch": False, "position": True}
    tried = found["aspects"]["batch"]["tried"][0]
    assert tried["difference"]["value"] != tried["difference"]["other"]
    # In line the third part joins two merged before it; in pairs it is the first of its own.
    assert tried["parted"].startswith("merge: finish")
    assert "split 0" in tried["parted"]
    code, text = call(*words, "--require", "batch")  # in float16 the same merges may round alike
    assert ("values differ from merge: finish" in text) or code == 1
    assert call(*words[:1], *words[1:], "--vary", "position", "--require", "position")[0] == 0


def bits_of(result: RunData, place: Place) -> bytes:
    assert isinstance(result.problem, Problem)
    done = compute(result.program, place, recipe_source(result.problem))
    return bytes(done.rows[0][:1].tobytes())


@pytest.mark.parametrize("hw", ["ascend_910b2", "h200", pytest.param("ascend_950", marks=pytest.mark.exhaustive)])
def test_one_structure_of_a_row_is_one_set_of_bits(hw: str) -> None:
    """Tiles of rows, slices, lead, packing: bits agree wherever structure says so, and it does not say so always."""
    ascend = hw.startswith("ascend")
    changes: list[dict[str, Any]] = [
        {},
        {"block_q": 16},
        {"block_kv": 64},
        {"pack": "off"},
        {"splits": 2},
        {"merge": "tree"},
        *([{"vector_rows": 1}, {"depth": 0}, {"depth": 3}] if ascend else []),
    ]
    problem = DECODE.model_copy(update={"batch": 2})

    def built(more: dict[str, Any]) -> RunData:
        tiling = {**FIELDS, "splits": 3, **more}
        return npusim.run("split_kv", hw=hw, problem=problem, tiling=tiling, numerics=False, precision="output=float32")

    found = [built(more) for more in changes]
    shapes = [row_key(r.program, Place(0)) for r in found]
    bits = [bits_of(r, Place(0)) for r in found]
    same = [shape == shapes[0] for shape in shapes]
    assert same == ["block_kv" not in c and "splits" not in c and "merge" not in c for c in changes]
    assert all(b == bits[0] for b, is_same in zip(bits, same, strict=True) if is_same)
    assert all(b != bits[0] for b, is_same in zip(bits, same, strict=True) if not is_same)


def test_differences_are_those_of_the_result() -> None:
    found = npusim.invariant("split_kv", problem=DECODE, tiling={**FIELDS, "splits": 3}, vary=["splits"])
    first = found["splits"].first
    assert first is not None
    assert first.difference is not None
    outputs = [
        npusim.run("split_kv", problem=DECODE, tiling={**FIELDS, "splits": n}, rows="all", heads="all").output[0, 0, 0]
        for n in (3, int(first.what.removeprefix("splits=")))
    ]
    column = int(np.nonzero(outputs[0] != outputs[1])[0][0])
    assert str(first.difference).startswith(f"O head 0 row 0 column {column}: {float(outputs[0][column]):.9g} | ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("split_kv", "--require", "batches"), "Did you mean `batch`? Allowed: batch, position, length, page"),
        (("split_kv", "--vary", "tile", "--require", "batch"), "--require batch: it is not in --vary tile"),
        (("tiling_allreduce", "--hw", "ascend_910b2_x8"), "ascend_910b2_x8: invariance is examined on one device"),
        (("gemm", "--problem", "m=64,n=64,k=64"), "schedule gemm has no bits: nothing to examine"),
    ],
)
def test_what_cannot_be_examined_is_said(words: tuple[str, ...], message: str) -> None:
    code, text = call(*words)
    assert code == 2
    assert message in text


# ---------------------------------------------------------------- as it is served

RAGGED = Problem(heads=3, kv_heads=1, seq_q=1, lengths=(64, 640, 200), head_dim=32, page=16, causal=True)
#: A kernel that splits by how many sequences there are, not by their own lengths.
PLANTED_COUNT = """
from dataclasses import replace
from npusim.library import find_schedule

ASCEND = find_schedule("split_kv", "ascend")


def build(problem, tiling, device, precision):
    splits = {} if tiling.split_keys else {"splits": 2 if problem.batch > 3 else 4}
    return ASCEND.build(problem, tiling.model_copy(update=splits), device, precision)


KERNEL = replace(ASCEND, name="planted", build=build)
"""


def test_a_planted_split_count_that_hangs_on_the_batch_is_named_and_priced(tmp_path: Path) -> None:
    file = tmp_path / "planted.py"
    file.write_text(PLANTED_COUNT)
    words = (f"{file}:KERNEL", "--lengths", "64,640,200", "--seq-q", "1", "--page", "16", "-t", "block_kv=32")
    code, text = call(*words, "--precision", "output=float32", "--require", "batch,page,position", "--json")
    found = json.loads(text[text.index("{") : text.rindex("}") + 1])
    assert code == 1
    assert found["required"] == {"batch": False, "page": True, "position": True}
    batch = found["aspects"]["batch"]
    assert batch["guarantee"] == "split_keys=160"  # 20 tiles in four parts
    assert batch["cost_us"] is not None
    changed = {t["what"] for t in batch["tried"] if t["difference"]}
    assert changed == {
        "a batch of 2 times these lengths",
        "a batch of 8 times these lengths",
        "a neighbour of 1280 keys",
    }


def test_a_tile_that_is_chosen_for_each_call_has_a_row_and_fails_what_is_required() -> None:
    words = ("split_kv", "-w", "qwen2_7b", "--seq-q", "1", "--seq-kv", "2k", "--require", "batch", "--json")
    code, text = call(*words)
    found = json.loads(text[text.index("{") : text.rindex("}") + 1])
    assert code == 1
    assert found["required"] == {"batch": False}
    assert found["aspects"]["batch"]["verdict"] == "cannot"  # in the kernel of the call itself
    choice = found["aspects"]["choice"]
    assert (choice["verdict"], choice["cost_us"] > 0) == ("changes", True)
    fields = choice["guarantee"].replace(" ", ",")
    assert f"npusim chooses other fields for batch=8; -t {fields} fixes them" in text

    same: dict[str, Any] = {"workload": "qwen2_7b", "seq_q": 1, "seq_kv": 2048, "rows": "0", "heads": "all"}
    fixed = dict(field.split("=") for field in fields.split(","))
    runs = [npusim.run("split_kv", batch=n, tiling=t, **same) for n, t in ((1, None), (8, None), (8, fixed))]
    one, chosen, named = (r.output[0].view(np.uint16) for r in runs)
    assert (one != chosen).any()
    np.testing.assert_array_equal(one, named)
    code, text = call(*words, "-t", fields)
    assert code == 0
    assert json.loads(text)["aspects"]["choice"]["verdict"] == "cannot"


def test_a_fixed_size_of_splits_leaves_company_and_chunks_no_say() -> None:
    found = npusim.invariant(
        "split_kv",
        problem=RAGGED,
        tiling={**FIELDS, "split_keys": 256},
        vary=["batch", "position", "page", "chunk", "prefill", "rule"],
    )
    assert {f.aspect: f.verdict for f in found.findings} == {
        **dict.fromkeys(("batch", "position", "page"), "cannot"),
        **dict.fromkeys(("chunk", "prefill", "choice"), "not seen"),  # masks are other steps
        "rule": "none",
    }
    assert found.sequence == 1


def test_a_tile_of_the_same_class_is_the_same_function_of_finite_inputs() -> None:
    """Blocks of 128 rows and of 64 visit other hidden tiles, which change no sum and no maximum."""
    found = npusim.invariant(
        "flash", workload="smollm2", hw="h100", seq=512, tiling={"block_q": 128, "block_kv": 32}, vary=["tile"]
    )
    tried = {t.what: t for t in found["tile"].tried}
    assert tried["block_q=64"].is_same_class
    assert not tried["block_q=64"].is_same_structure
    assert tried["block_q=64"].difference is None
    assert not tried["block_kv=16"].is_same_class
    assert tried["block_kv=16"].difference is not None
    assert replace(found["tile"], tried=(tried["block_q=64"],)).verdict == "same class"


def test_rules_change_bits_and_a_prompt_is_another_kernel() -> None:
    found = npusim.invariant(
        "split_kv",
        problem=RAGGED,
        precision="output=float32",
        tiling=declared("split_kv", "ascend_910b2", **FIELDS, splits="fa3"),
        vary=["rule", "prefill"],
    )
    assert found["rule"].verdict == "changes"
    assert found["rule"].guarantee == "splits=fa3"
    same = {t.what for t in found["rule"].tried if t.is_same_structure}
    prefill = found["prefill"]
    assert prefill.verdict == "changes"
    assert prefill.first is not None
    assert "block 0 of the row" in prefill.first.parted
    for one in found["rule"].tried:
        done = npusim.run(
            "split_kv",
            problem=RAGGED,
            precision="output=float32",
            tiling=declared("split_kv", "ascend_910b2", **FIELDS, splits=one.what.removeprefix("splits=")),
            numerics=False,
            trace_groups=(),
        )
        assert done.latency_us == one.latency_us
    assert len(same) < len(found["rule"].tried)


UNIFORM, SERVED = {"seq_kv": 300}, {"lengths": (64, 260, 200), "page": 16}


@pytest.mark.parametrize(
    ("sizes", "bias"),
    [
        (UNIFORM, "shared"),
        (SERVED, "head"),
        pytest.param(UNIFORM, "head", marks=pytest.mark.exhaustive),
        pytest.param(SERVED, "shared", marks=pytest.mark.exhaustive),
    ],
)
def test_a_query_meets_the_same_row_of_a_bias_whatever_is_beside_it(sizes: dict[str, Any], bias: Any) -> None:
    problem = Problem(heads=3, kv_heads=1, seq_q=1, head_dim=32, causal=True, bias=bias, **sizes)
    fields: dict[str, Any] = {"split_keys": 128, "block_kv": 32}
    is_chosen = sizes is UNIFORM  # what is chosen for each of several lengths has a test of its own, above
    tiling = fields if is_chosen else declared("split_kv", "ascend_910b2", **fields)
    found = npusim.invariant("split_kv", problem=problem, tiling=tiling, vary=["batch", "chunk", "prefill"])
    unseen = ("chunk", "prefill", "choice") if is_chosen else ("chunk", "prefill")
    assert {f.aspect: f.verdict for f in found.findings} == {"batch": "cannot", **dict.fromkeys(unseen, "not seen")}
    one = declared("split_kv", "ascend_910b2", splits=1, block_kv=32)
    parts = npusim.invariant("split_kv", problem=problem, tiling=one, vary=["splits"])
    assert parts["splits"].verdict == "changes"  # a bias does not hide what changes bits


# ---------------------------------------------------------------- plain tensors

SMALL: dict[str, int] = {"heads": 2, "tokens": 96, "key": 32, "value": 32}
STATES = ("retention", "gla", "gated_delta", "ssd")


def verdicts(schedule: str, hw: str, vary: list[str], sizes: dict[str, int] | None = None, **tiling: Any) -> list[str]:
    problem = KernelProblem(**{**SMALL, **(sizes or {})})
    fields = find_schedule(schedule, load_device(hw).family).tiling()  # a chosen tile may have no half
    own = {n: v for n, v in fields if n.startswith(("chunk", "block", "tile", "warps"))}
    tile = declared(schedule, hw, **{**own, **tiling})  # nothing is left to choose for each call, which takes seconds
    found = npusim.invariant(schedule, hw=hw, problem=problem, tiling=tile, vary=vary)
    assert [f.aspect for f in found.findings] == sorted(vary, key=ASPECTS.index)
    return [f.verdict for f in found.findings]


@pytest.mark.parametrize(("schedule", "hw"), in_turn(STATES, ("ascend_910b2", "h200", "v100")))
def test_a_head_of_a_recurrence_has_the_same_bits_in_any_company(schedule: str, hw: str) -> None:
    aspects = ["batch", "position", "length", "ranks"]
    assert verdicts(schedule, hw, [*aspects, "tile"]) == ["cannot", "cannot", "not seen", "changes", "cannot"]


@pytest.mark.parametrize("schedule", every(2, STATES))
def test_bits_of_runs_are_equal_where_a_recurrence_is_invariant(schedule: str) -> None:
    """Runs of several batches, heads and lengths have the bits of the run of one, in blocks of other values, too."""

    def output(block_value: int = 32, **sizes: int) -> Any:
        problem = KernelProblem(**{**SMALL, "tokens": 80, **sizes})
        tiling = declared(schedule, "ascend_910b2", chunk=32, block_value=block_value)
        return npusim.run(schedule, problem=problem, tiling=tiling, rows="all", heads="all").output

    one = output()
    for value, more in ((32, {"batch": 3}), (16, {"heads": 4}), (16, {"tokens": 81}), (32, {"tokens": 160})):
        np.testing.assert_array_equal(one[0].view(np.uint16), output(value, **more)[0, :2, :80].view(np.uint16))


#: Gradients and devices: by default dQ, which others add up, on an NPU, and dV, which nobody does, on a GPU.
GRADIENTS = [
    pytest.param(
        gradient, hw, marks=[] if (gradient, hw) in (("dq", "ascend_910b2"), ("dv", "h200")) else pytest.mark.exhaustive
    )
    for gradient in ("dq", "dk", "dv")
    for hw in ("ascend_910b2", "h200")
]


@pytest.mark.parametrize(("gradient", "hw"), GRADIENTS)
def test_a_gradient_is_that_of_its_sequence_and_who_adds_it_has_a_price(gradient: str, hw: str) -> None:
    vary = ["batch", "position", "length", "merge", "ranks"]
    more: dict[str, Any] = {"gradient": gradient, "block_q": 32, "block_kv": 32, "tile_q": 32, "tile_kv": 32}
    four: dict[str, int] = {**SMALL, "tokens": 128}  # blocks, whose sums another order rounds otherwise
    call: dict[str, Any] = {"hw": hw, "problem": KernelProblem(**four), "vary": vary}
    apart = npusim.invariant("flash_backward", tiling=declared("flash_backward", hw, **more), **call)
    assert [f.verdict for f in apart.findings[:3]] == ["cannot", "cannot", "none"]  # every query sees every key
    added = npusim.invariant("flash_backward", tiling=declared("flash_backward", hw, **more, method="added"), **call)
    is_added = gradient == "dq"
    assert added["batch"].verdict == ("not seen" if is_added else "cannot")
    assert added["batch"].guarantee == ("method=apart" if is_added else "")
    assert apart["merge"].verdict == ("changes" if is_added else "not seen")
    if is_added:
        assert apart["merge"].guarantee == "method=apart"
        assert added["batch"].cost_us == pytest.approx(apart.base.latency_us - added.base.latency_us)
    later = verdicts("flash_backward", hw, ["length"], {**four, "causal": 1}, **more)
    assert later == (["not seen"] if is_added else ["none"])  # keys have a part of every later query


#: A kernel of plain tensors of a user's own whose decay hangs on how many sequences there are.
PLANTED_SUM = """
from dataclasses import replace
from npusim.library import find_schedule

ASCEND = find_schedule("retention", "ascend")


def build(problem, tiling, device, precision):
    chunk = 16 if problem.sizes.get("batch", 1) > 1 else tiling.chunk
    return ASCEND.build(problem, tiling.model_copy(update={"chunk": chunk}), device, precision)


KERNEL = replace(ASCEND, name="planted", build=build)
"""


def test_a_planted_chunk_that_hangs_on_the_batch_is_found(tmp_path: Path) -> None:
    file = tmp_path / "planted.py"
    file.write_text(PLANTED_SUM)
    sizes = ",".join(f"{n}={size}" for n, size in SMALL.items())
    words = (f"{file}:KERNEL", "--problem", sizes, "--precision", "output=float32")
    code, text = call(*words, "--require", "batch,ranks", "--json")
    found = json.loads(text[text.index("{") : text.rindex("}") + 1])
    assert code == 1
    assert found["required"] == {"batch": False, "ranks": True}
    assert found["aspects"]["batch"]["tried"][0]["parted"].startswith("states: ")
    # The chosen tile of a call is examined beside it: the planted chunk parts calls under it, too.
    assert "not batch- or choice-invariant; no tested field makes it invariant" in call(*words, "--vary", "batch")[1]


def test_keys_of_blocks_that_run_as_lanes_are_those_of_each_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body of several blocks gives each the key of a body of it alone; a key is read as far as it is asked."""
    bodies: list[int] = []
    collect = variants._keys_of_blocks

    def counted(phase: ProgramPhase, blocks: Sequence[Any], how: tuple[int, bool]) -> list[Any]:
        bodies.append(len(blocks))
        return collect(phase, blocks, how)

    monkeypatch.setattr(variants, "_keys_of_blocks", counted)
    fields = {**FIELDS, "splits": 4}
    run = npusim.run("split_kv", hw="h200", problem=DECODE, tiling=fields, numerics=False)
    whole = row_key(run.program, Place(0))
    assert max(bodies) > 1
    phases = [replace(phase, shape=id) for phase in run.program.phases]
    assert row_key(replace(run.program, phases=tuple(phases)), Place(0)) == whole
    bodies.clear()
    first = next(row_steps(run.program, Place(0)))
    assert (first, bodies) == (whole[0], [1])  # type: ignore[index]


def test_other_heads_are_computed_only_where_the_first_ones_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    heads: list[tuple[int, int]] = []

    def counted(program: TileProgram, place: Place, source: Any, count: int, **more: Any) -> Computed:
        heads.append((place.head, count))
        return compute(program, place, source, count, **more)

    monkeypatch.setattr(examination, "compute", counted)
    problem = DECODE.model_copy(update={"heads": 4, "kv_heads": 2})
    more: dict[str, Any] = {"problem": problem, "tiling": {**FIELDS, "splits": 3}}
    assert npusim.invariant("split_kv", vary=["splits"], **more)["splits"].verdict == "changes"
    assert 0 < heads.count((2, 2)) < heads.count((0, 2))
    made: list[int] = []

    def parts(*values: float) -> Iterator[Computed]:
        for number, value in enumerate(values):
            made.append(number)
            yield Computed({number: np.full((1, 4), value)}, [])

    bits = [examination._AsAsked(parts(*values)) for values in ((1, 2), (1, 2), (1, 3), (0, 2))]
    assert examination._differing(bits[0], bits[1]) is None
    assert made == [0, 0, 1, 1]
    differing = examination._differing(bits[0], bits[2])
    assert differing is not None
    assert differing[0] == (1, 0, 0)
    made.clear()
    assert examination._differing(bits[0], bits[3]) is not None
    assert made == [0]


def test_rules_that_build_one_program_are_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compared, each_time = list[str](), examination._Examination._compared

    def counted(self: Any, call: Any, built: Any) -> examination.Tried:
        compared.append(call.what)
        return each_time(self, call, built)

    monkeypatch.setattr(examination._Examination, "_compared", counted)
    more: dict[str, Any] = {"problem": DECODE, "hw": "h200", "tiling": {**FIELDS, "splits": 3}}
    once = npusim.invariant("split_kv", vary=["rule"], **more)["rule"]
    assert 0 < len(compared) < len(once.tried)
    monkeypatch.setattr(examination._Examination, "_compared_once", each_time)
    assert npusim.invariant("split_kv", vary=["rule"], **more)["rule"] == once


@pytest.mark.parametrize("hw", ["ascend_910b2", "h200"])
@pytest.mark.parametrize("queries", [5, 20, 100])
def test_rows_from_one_on_are_computed_without_the_rows_before_them(hw: str, queries: int) -> None:
    """Blocks of several packed heads, and of one head alone; the last query, and rows from one in the middle on."""
    problem = DECODE.model_copy(update={"seq_q": queries, "causal_offset": 150 - queries, "causal": True})
    tiling = {**FIELDS, "splits": 3}
    run = npusim.run("split_kv", hw=hw, problem=problem, tiling=tiling, numerics=False, precision="output=float32")
    assert isinstance(run.problem, Problem)
    source = recipe_source(run.problem)
    for row in (queries - 1, queries // 2):
        whole, few = (compute(run.program, Place(row), source, 3, has_path=path) for path in (True, False))
        assert (bool(whole.events), list(few.events)) == (True, [])
        assert list(whole.rows) == list(few.rows) == [0, 1, 2]
        for head, rows in whole.rows.items():
            assert rows.tobytes() == few.rows[head].tobytes()
        cut = needed_blocks(run.program, [row], range(3), since=row)
        assert all(
            sum(b.rows for b in cut[name]) < sum(b.rows for b in blocks)
            for name, blocks in needed_blocks(run.program, [row], range(3)).items()
        )
        # Packed heads whose rows are far apart are blocks of their own.
        assert row < queries - 1 or (hw, queries) != ("h200", 20) or all(b.rows == 1 for b in cut["attention"])
