"""Defaults fit the head sizes of real models; what was chosen stays, and errors offer what does fit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import npusim
from npusim import library, run
from npusim.config.node_file import load_machine
from npusim.config.problem import Problem
from npusim.config.tiling import build_tiling
from npusim.errors import BufferOverflowError, NpusimError, SpecError, TilingError
from npusim.kernels.declare import registry
from npusim.library import SCHEDULES, find_schedule, packaged
from npusim.machines.ascend.phase_writer import AscendPhase
from npusim.machines.ascend.product_plan import FlashTiling

ATTENTION = [s for s in SCHEDULES.values() if s.problem is Problem and s.family != "node"]


@pytest.mark.parametrize("schedule", ATTENTION, ids=lambda s: f"{s.name}-{s.family}")
@pytest.mark.parametrize("sizes", [(64, 64), (192, 192), (192, 128), (256, 256)], ids=str)
def test_defaults_fit_every_head_size_of_published_kernels(schedule, sizes) -> None:  # type: ignore[no-untyped-def]
    family = {"ascend": "ascend_910b2", "nvidia": "h200", "cpu": "xeon_avx512"}[schedule.family]
    device = load_machine(schedule.hw or family)
    dtype = "float8_e4m3fn" if (schedule.name, schedule.family) == ("fp8_attention", "nvidia") else "float16"
    for causal in (False, True):
        problem = Problem(heads=2, seq_q=1024, head_dim=sizes[0], value_head_dim=sizes[1], dtype=dtype, causal=causal)
        tiling, program = schedule.fitted(problem, schedule.tiling(), device, schedule.precision())
        assert program.phases
        declared = schedule.declared(schedule.tiling(), device, problem, schedule.precision())
        changed = [f"{k}={v}" for k, v in tiling if v != getattr(declared, k)]
        said = [note for note in program.notes if "smaller than the default" in note]
        assert [note.partition(":")[0].split() for note in said] == ([changed] if changed else [])


def test_a_run_says_which_default_is_smaller_and_computes_with_it() -> None:
    problem = Problem(heads=1, seq_q=128, head_dim=256)
    declared = FlashTiling(block_q=128, kernel="pto")  # taken as it is; left to the run, a block of 64 rows is faster
    result = run("flash", problem=problem, tiling=declared, rows="all", trace_groups=())
    assert result.tiling.vector_rows == 8  # type: ignore[attr-defined]
    assert "vector_rows=8: smaller than the default, which does not fit" in result.notes
    assert result.numerics is not None
    assert result.numerics.error.rmse < 1e-3
    usual = run(
        "flash", problem=Problem(heads=1, seq_q=128, head_dim=128), tiling=declared, numerics=False, trace_groups=()
    )
    assert usual.tiling.vector_rows is None  # type: ignore[attr-defined]
    assert not [note for note in usual.notes if "smaller" in note]


def test_what_would_fit_of_a_huge_block_is_found_in_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule, device = find_schedule("flash", "ascend"), load_machine("ascend_910b2")
    problem = Problem(heads=1, seq_q=256, head_dim=128)
    tried: list[Any] = []
    usual = registry.largest_that_fit

    def counted(build: Any, tiling: Any) -> str:
        return usual(lambda t: (tried.append(t), build(t)), tiling)

    monkeypatch.setattr("npusim.kernels.declare.registry.largest_that_fit", counted)
    chosen = build_tiling(schedule.tiling, {"block_q": 64, "block_kv": 10**8, "vector_rows": 16})
    with pytest.raises(BufferOverflowError, match=r"unchanged: block_kv=\d+$") as error:
        schedule.fitted(problem, chosen, device, schedule.precision())
    assert len(tried) < 300
    found = int(str(error.value).rpartition("=")[2])
    schedule.program(problem, chosen.model_copy(update={"block_kv": found}), device, schedule.precision())
    with pytest.raises(BufferOverflowError):
        schedule.program(problem, chosen.model_copy(update={"block_kv": found + 16}), device, schedule.precision())


@pytest.mark.parametrize(
    ("fields", "also"),
    [({"block_kv": 256, "splits": 4}, "vector_rows=16"), ({"vector_rows": 60, "splits": 4}, "block_kv=128")],
)
def test_where_some_sizes_are_chosen_the_others_shrink(fields: dict[str, int], also: str) -> None:
    """qwen2_7b, one query on 2k keys, split: slices of 32 rows of 256 keys do not fit beside O and its parts."""
    found = run("split_kv", workload="qwen2_7b", seq_q=1, seq_kv=2048, tiling=fields, numerics=False, trace_groups=())
    assert f"{also}: smaller than the default, which does not fit" in found.notes
    assert all(getattr(found.tiling, name) == value for name, value in fields.items())


def test_what_was_chosen_is_never_changed_and_the_error_offers_slices_too() -> None:
    schedule, device = find_schedule("flash", "ascend"), load_machine("ascend_910b2")
    problem = Problem(heads=1, seq_q=1024, head_dim=256)
    chosen = build_tiling(schedule.tiling, {"block_q": 128, "block_kv": 512, "vector_rows": 16})
    with pytest.raises(BufferOverflowError, match=r"unchanged: block_q=80 or block_kv=432 or vector_rows=\d+") as error:
        schedule.fitted(problem, chosen, device, schedule.precision())
    rows = int(str(error.value).rpartition("vector_rows=")[2])
    for value, fits in ((rows, True), (rows + 1, False)):
        tiling = chosen.model_copy(update={"vector_rows": value})
        try:
            schedule.program(problem, tiling, device, schedule.precision())
        except BufferOverflowError:
            assert not fits
        else:
            assert fits


@pytest.mark.parametrize(
    ("schedule", "options", "message"),
    [
        ("flash", {"dtype": "bfloat16", "precision": "fa16"}, r"P V: float16 by bfloat16, .*\(--dtype float16\)"),
        ("standard", {"dtype": "bfloat16", "precision": "operand=float16"}, r"\(--dtype float16\)"),
        ("flash", {"dtype": "float32"}, "multiplies float16, bfloat16; --dtype float16 rounds inputs"),
        ("pasa", {"dtype": "float32"}, "--dtype float16 rounds inputs to it"),
        ("volta_flash", {"dtype": "bfloat16"}, "--dtype float16 rounds to it"),
        ("flash", {"arithmetic": "hopper.wgmma.k32.e4m3.f32"}, r"Q K\^T: float16 by float16, but hopper"),
    ],
)
def test_formats_that_do_not_meet_say_what_to_do(schedule: str, options: dict[str, str], message: str) -> None:
    with pytest.raises(NpusimError, match=message) as error:
        run(schedule, seq=128, **options)  # type: ignore[arg-type]
    assert isinstance(error.value, SpecError | TilingError)


def test_float32_tensors_run_when_they_are_rounded() -> None:
    rng = np.random.default_rng(0)
    wide = {n: rng.standard_normal((1, 1, 64, 32), np.float32) for n in "qkv"}
    half = {n: values.astype(np.float16) for n, values in wide.items()}
    results = [run("flash", tensors=wide, dtype="float16", rows="all"), run("flash", tensors=half, rows="all")]
    assert np.array_equal(results[0].output, results[1].output)
    with pytest.raises(NpusimError, match="--dtype float16"):
        run("flash", tensors=wide)
    wide["k"][0, 0, 3, 1] = 7e4
    with pytest.raises(NpusimError, match=r"1 values of k are beyond float16's largest, 65504; .* at \(0, 0, 3, 1\)"):
        run("flash", tensors=wide, dtype="float16")


def test_each_schedule_is_found_in_the_file_of_its_name_or_in_the_one_that_declares_it() -> None:
    names = {name for name, _ in SCHEDULES}
    files = {path.stem for path in Path(library.__file__).parent.glob("*.py")} - {"__init__"}
    assert files <= names, "a file that declares no schedule of its name"
    assert {"unified", "offload_classic", "offload_cooperative"} == names - files
    for name in sorted(names):
        of_name = packaged(name)
        assert {(name, family) for family in of_name} == {key for key in SCHEDULES if key[0] == name}
        assert all(schedule is SCHEDULES[name, family] for family, schedule in of_name.items())


def test_a_run_imports_neither_other_schedules_nor_what_compiles() -> None:
    npusim.run("flash", seq=256, numerics=False, trace_groups=())  # its machine code is kept from now on
    code = "import sys, npusim; npusim.run('flash', seq=256, numerics=False, trace_groups=()); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=900)
    files = {path.stem for path in Path(library.__file__).parent.glob("*.py")} - {"__init__", "flash"}
    others = {f"npusim.library.{file}" for file in files}
    assert not {"numba", "networkx", "npusim.machines.node.node_simulation", *others}.intersection(done.stdout.split())


def test_a_phase_is_written_once_whatever_the_order_of_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of two deals share all but the order of blocks; a tile that does not fit is refused in both alike."""
    device, problem = load_machine("ascend_910b2"), Problem(heads=3, seq_q=640, head_dim=64, causal=True)
    schedule, made, written = find_schedule("flash", "ascend"), AscendPhase.__init__, list[str]()

    def counted(self: AscendPhase, *args: Any) -> None:
        written.append("")
        made(self, *args)

    monkeypatch.setattr(AscendPhase, "__init__", counted)

    def phases_of(**fields: Any) -> Any:
        tiling = build_tiling(schedule.tiling, {"block_q": 64, "block_kv": 128, "depth": 2, **fields})
        return schedule.program(problem, tiling, device, schedule.precision(), is_hinted=False).phases

    (ours,), (dealt,) = (phases_of(deal=deal) for deal in ("round_robin", "balanced"))
    assert len(written) == 1
    assert ours.alone != dealt.alone
    assert set(ours.alone) == set(dealt.alone)
    assert phases_of(deal="balanced", depth=3)[0].alone == dealt.alone
    assert len(written) == 2, "another depth has other slots"
    refusals = set[str]()
    for deal in ("round_robin", "balanced"):
        with pytest.raises(BufferOverflowError) as refused:
            phases_of(deal=deal, block_q=512, block_kv=512)
        refusals.add(str(refused.value))
    assert len(refusals) == 1
    assert len(written) == 3
