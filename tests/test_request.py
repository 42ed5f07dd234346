"""One object from the command line to the program: its fields, what a line says of them, and back."""

from __future__ import annotations

import inspect
import shlex
import sys
from dataclasses import MISSING, fields, replace
from typing import Any, get_args

import pytest
from typer.testing import CliRunner

import npusim
from npusim.cli.app import app
from npusim.config.cases import BaselineFile
from npusim.config.load import load_device, load_workload
from npusim.config.problem import CopyProblem, Dtype, GemmProblem
from npusim.config.tiling import build_tiling
from npusim.errors import NpusimError, SpecError
from npusim.kernels.attention.call_blocks import kv_runs
from npusim.library import find_schedule
from npusim.simulation.plan import Plan, plan_of
from npusim.simulation.request import NEEDS, OPTIONS, Request, RunOptions, command
from npusim.simulation.simulate import run_request
from npusim.studies.explore.exploration import search
from npusim.studies.explore.search import Options
from npusim.studies.explore.space import SearchRequest

#: What `npusim.explore` has besides what it asks for.
OF_A_SEARCH = frozenset(
    [
        "fields",
        "jobs",
        "cluster",
        "out",
        "resume",
        "auto",
        "exhaustive",
        "pareto",
        "max_rmse",
        "finite",
        "on_outcome",
        "studies",
        "check_all",
        "budget_s",
    ]
)


def arguments(function: Any) -> dict[str, object]:
    return {p.name: p.default for p in inspect.signature(function).parameters.values()}


def defaults() -> dict[str, object]:
    return {f.name: inspect.Parameter.empty if f.default is MISSING else f.default for f in fields(Request)}


def test_the_arguments_of_run_are_the_fields_of_a_request() -> None:
    assert arguments(npusim.run) == defaults()
    types = {name: hint.__forward_arg__ for name, hint in RunOptions.__annotations__.items()}
    assert {"schedule": "str", **types} == {f.name: f.type for f in fields(Request)}


def test_the_arguments_of_explore_are_fields_of_a_request() -> None:
    given = {name: value for name, value in arguments(npusim.explore).items() if name not in OF_A_SEARCH}
    assert given == {name: defaults()[name] for name in given}
    assert "tiling" in given


def test_a_baseline_has_no_words_of_its_own() -> None:
    own = {"schema_id", "description", "expect"}
    assert set(BaselineFile.model_fields) - own <= {f.name for f in fields(Request)}


def test_every_field_has_an_option_but_what_the_command_line_sets_itself() -> None:
    assert {f.name for f in fields(Request)} - OPTIONS.keys() == {"schedule", "limit_s", "progress"}
    names = [name for option in OPTIONS.values() for name in option.names]
    assert len(names) == len(set(names))


def test_a_shape_in_one_word_is_the_sizes_of_a_problem() -> None:
    request = Request("flash", shape="B4,N32/8,S1/6k,D128")
    problem = request.attention()
    assert (problem.batch, problem.heads, problem.kv_heads) == (4, 32, 8)
    assert (problem.seq_q, problem.seq_kv, problem.head_dim, problem.value_head_dim) == (1, 6144, 128, 128)
    assert request == Request("flash", batch=4, q_heads=32, kv_heads=8, seq_q=1, seq_kv="6k", head_dim=128)
    assert command("run", "flash", request.asked() or (), ()) == (
        "npusim run flash --seq-q 1 --seq-kv 6144 --batch 4 --q-heads 32 --kv-heads 8 --head-dim 128"
    )
    alone = Request("flash", q_heads=3, seq=64).attention()
    assert (alone.heads, alone.kv_heads) == (3, 3)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"shape": "B4,X3"}, "'X3' is not a size; write B4,N32/8"),
        ({"shape": "B4/2"}, "'B4/2' is not a size;"),
        ({"shape": "B4,B2"}, "B occurs twice"),
        ({"shape": "S0"}, "write a positive whole number"),
        ({"shape": "S64", "seq": 64}, "states the same size as seq"),
        ({"kv_heads": 8}, "set q_heads too"),
        ({"q_heads": 8, "tensor_parallel": 2}, "remove tensor_parallel"),
        ({"q_heads": 8, "tensors": "smollm2_layer18_group"}, "the tensors already have the sizes"),
    ],
)
def test_a_shape_of_another_form_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(NpusimError, match=words):
        Request("flash", **given).sizes()


def test_formats_offered_are_those_of_a_problem() -> None:
    # float64 is there to check schedules with, from Python.
    assert set(OPTIONS["dtype"].choices) == set(get_args(Dtype)) - {"float64"}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, ""),
        ({"workload": "qwen2_7b", "seq": 512, "tensor_parallel": 4}, "-w qwen2_7b --seq 512 --tp 4"),
        ({"causal": False, "method": "auto", "numerics": False, "rows": "all"}, "--no-causal"),
        ({"causal": True, "ignore": ("window", "softcap")}, "--causal --ignore window,softcap"),
        ({"problem": GemmProblem(m=16, n=32, k=64)}, "--problem m=16,n=32,k=64"),
        ({"problem": CopyProblem(bytes=1024), "hw": "v100"}, "--problem bytes=1024 --hw v100"),
        ({"tiling": {"block_kv": 64, "depth": 1}, "overrides": {"a.b": "2"}}, "-C a.b=2 -t block_kv=64 -t depth=1"),
    ],
)
def test_what_is_run_is_said_as_a_command_line(given: dict[str, Any], words: str) -> None:
    said = Request("flash", **given).asked()
    assert said is not None
    assert command("run", "flash", said, []) == shlex.join(["npusim", "run", "flash", *words.split()])


def test_only_what_is_set_of_a_tiling_is_said() -> None:
    fields_ = build_tiling(find_schedule("flash", "ascend").tiling, {"block_kv": 64})
    assert Request("flash", tiling=fields_).asked() == (("-t", "block_kv=64"),)


@pytest.mark.parametrize(
    "given",
    [
        {"tensors": "file.npz"},
        {"arithmetic": "x"},
        {"layout": "bsh"},
        {"hw": load_device("v100")},
        {"workload": load_workload("deit_b")},
    ],
)
def test_what_no_command_line_can_say_is_not_said(given: dict[str, Any]) -> None:
    assert Request("flash", **given).asked() is None


def test_a_tiling_field_passes_eight_functions_from_the_command_line_to_a_tile() -> None:
    """Those on the way to where tiles are made that are given it: by itself, or in what was asked for."""
    value, passed = 208, list[str]()

    def holds(given: object) -> bool:
        if isinstance(given, tuple | list):
            return any(map(holds, given))
        given = getattr(given, "tiling", given)
        given = given.get("block_kv") if isinstance(given, dict) else getattr(given, "block_kv", given)
        return given in (value, str(value))

    def called(frame: Any, event: str, _: object) -> None:
        if event != "call" or frame.f_code is not kv_runs.__code__:
            return
        while frame := frame.f_back:
            code = frame.f_code
            given = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            own = "/npusim/" in code.co_filename and not code.co_name.startswith("<")
            if own and any(holds(frame.f_locals.get(name)) for name in given):
                passed.append(code.co_name)
        raise KeyboardInterrupt

    sys.setprofile(called)
    try:
        CliRunner().invoke(
            app, f"run flash -t block_kv={value},kernel=pto,deal=round_robin --seq 300 --no-numerics --no-save".split()
        )
    finally:
        sys.setprofile(None)
    assert passed == ["attention_cells", "_phase", "phases", "_build", "fitted", "program_of", "run_plan", "run"]


def test_what_a_line_says_is_what_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every option through the command line arrives in its field, read."""
    found: list[Request] = []

    def caught(plan: Plan) -> None:
        found.append(plan.request)
        raise KeyboardInterrupt

    any_plan = replace(plan_of(Request("flash", seq=256)), features=frozenset(NEEDS))
    monkeypatch.setattr(sys.modules["npusim.simulation.plan"], "plan_of", lambda r: replace(any_plan, request=r))
    monkeypatch.setattr(sys.modules["npusim.simulation.simulate"], "run_plan", caught)
    line = (
        "run flash -w deit_b --seq 2k --seq-q 1 --seq-kv 3 --batch 4 --tp 5 --causal --dtype bfloat16 "
        "--ignore window,softcap --problem bytes=1KiB --hw v100 -C a=1 -C b=2 -t x=1,y=2 --precision p "
        "--arithmetic a --method des --tensors f --tensor-prefix g --layout tnd --rows 0-2 --heads all --seed 7 "
        "--no-numerics --diagnose --presets --no-save --force"
    )
    CliRunner().invoke(app, line.split())
    (request,) = found
    assert request.progress is not None
    assert request == Request(
        "flash",
        workload="deit_b",
        seq=2048,
        seq_q=1,
        seq_kv=3,
        batch=4,
        tensor_parallel=5,
        causal=True,
        dtype="bfloat16",
        ignore=("window", "softcap"),
        problem=CopyProblem(bytes=1024),
        hw="v100",
        overrides={"a": "1", "b": "2"},
        tiling={"x": "1", "y": "2"},
        precision="p",
        arithmetic="a",
        method="des",
        tensors="f",
        tensor_prefix="g",
        layout="tnd",
        rows="0-2",
        heads="all",
        seed=7,
        numerics=False,
        diagnose=True,
        presets=True,
        trace_groups=(),
        limit_s=None,
        progress=request.progress,
    )


def test_a_request_runs_and_is_searched() -> None:
    request = Request("flash", seq=256, numerics=False, trace_groups=())
    result = run_request(request)
    axes = {"block_kv": [result.tiling.model_dump()["block_kv"]]}
    found = search(SearchRequest(request, (request.schedule,)).spec(axes), Options())
    assert found.best is not None
    assert found.best.cycles == result.cycles


def test_a_method_is_refused_before_anything_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("npusim.simulation.plan.chosen_tensors", lambda *_: pytest.fail("inputs are read"))
    for call in (lambda: npusim.run("flash", method="x"), lambda: npusim.explore("flash", auto=True, method="x")):
        with pytest.raises(SpecError, match="method 'x'; allowed: auto, des"):
            call()
