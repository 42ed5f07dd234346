"""npusim's own programs as the text of TileLang-Ascend: read back, checked, proved, and what has no text refused."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from typer.testing import CliRunner

import npusim
from npusim.cli.app import app
from npusim.errors import NpusimError
from npusim.kernels.tilelang.ascend_recording import program_call
from npusim.program.numerics.executor import execute
from npusim.program.numerics.input_tensors import kernel_source
from npusim.simulation.request import Request
from npusim.simulation.written_program import written_program
from npusim.studies.flags import check_every_length, check_program
from tests.tile_language.flag_programs import removals, written
from tests.tile_language.test_developer import drawn
from tests.ttir.stored import stored

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("declared_tiles", "own_bits_alone")

#: One slice of rows on each vector core, and blocks that do not overlap.
TILE = {"block_q": 64, "block_kv": 64, "vector_rows": 32, "pipeline": "block"}


def request(schedule: str = "flash", **sizes: Any) -> Request:
    """Return a request without a mask."""
    how: dict[str, Any] = {"workload": "pangu_38b", "hw": "ascend_910b2", "causal": False, **sizes}
    return Request(schedule=schedule, **how)


def text_of(folder: Path, every: str = "", **sizes: Any) -> Path:
    """Return the file with the text of a request."""
    return written(folder, written_program(request(**sizes), every=every), "emitted.py")


def of_call(path: Path, name: str, arguments: dict[str, object], given: dict[str, Any]) -> dict[str, Any]:
    """Return what a text stores that npusim reads and runs."""
    (call,) = program_call(path, name, arguments)
    call = replace(call, arguments={n: replace(x, data=given[n]) for n, x in call.tensors.items()})
    run: Any = npusim.run  # it takes a call too
    return stored(run(call, hw="ascend_910b2", rows="all"), given)


def read_back(path: Path, arguments: dict[str, object], *tensors: Any) -> Any:
    """Return the output of attention as a text that npusim reads and runs."""
    given = {**dict(zip("qkv", tensors, strict=True)), "o": np.zeros_like(tensors[0])}
    return of_call(path, "flash", arguments, given)["o"]


def packaged(tiling: dict[str, Any], *tensors: Any) -> Any:
    """Return the output of the packaged kernel."""
    how: Any = {"tiling": tiling, "causal": False, "rows": "all", "heads": "all"}
    result = npusim.run("flash", tensors=dict(zip("qkv", tensors, strict=True)), hw="ascend_910b2", **how)
    assert result.output is not None
    return result.output


@pytest.mark.parametrize(
    ("seq", "heads", "dim", "tiling"),
    [
        (256, 2, 64, {"depth": 0}),
        (320, 5, 64, {"depth": 1}),
        (320, 5, 64, {"depth": 2}),
        (384, 5, 64, {"depth": 3}),
        (512, 3, 128, {"depth": 2, "block_q": 64, "block_kv": 128}),
        (512, 4, 32, {"depth": 2, "block_kv": 128}),
        (256, 2, 64, {"depth": 1, "order": "groups"}),
        (256, 2, 64, {"depth": 0, "order": "serial"}),
    ],
)
def test_a_text_has_the_bits_of_its_program_and_no_fault(
    seq: int, heads: int, dim: int, tiling: dict[str, Any], tmp_path: Path
) -> None:
    how: dict[str, Any] = {"seq": seq, "q_heads": heads, "kv_heads": heads, "head_dim": dim, "tiling": TILE | tiling}
    path = text_of(tmp_path, **how)
    assert not check_program(path, "flash").faults
    tensors = [drawn(1, heads, seq, dim, seed=i) for i in range(3)]
    assert np.array_equal(read_back(path, {}, *tensors), packaged(TILE | tiling, *tensors))


@pytest.mark.parametrize(("m", "n", "k"), [(256, 256, 256), (128, 640, 64), (512, 256, 192)])
def test_a_product_as_a_text_has_the_bits_of_its_program(m: int, n: int, k: int, tmp_path: Path) -> None:
    tiling = {"block_m": 64, "block_n": 128, "block_k": 64, "load_k": 64}
    how: Any = {"problem": {"m": m, "n": n, "k": k}, "tiling": tiling, "hw": "ascend_910b2"}
    path = written(tmp_path, written_program(Request(schedule="gemm", **how)), "emitted.py")
    assert not check_program(path, "gemm").faults
    a, b = drawn(m, k), drawn(k, n, seed=1)
    given = {"a": a[None, None], "b": b[None, None], "c": np.zeros((1, 1, m, n), np.float16)}
    made = of_call(path, "gemm", {}, given)["c"]
    program = npusim.run("gemm", numerics=False, **how).program
    assert program is not None
    tensors = list(program.tensors.values())
    done = execute(program, kernel_source([t for t in tensors if t.role == "input"], 0, {"a": a, "b": b}))
    (c,) = [t for t in tensors if t.role == "output"]
    assert np.array_equal(made[0, 0], done.tensors.head(c, 0, 0))


@pytest.mark.parametrize(("k", "load"), [(128, 64), (512, 128)])
def test_a_sum_without_a_loop_is_refused(k: int, load: int) -> None:
    how: Any = {"problem": {"m": 256, "n": 128, "k": k}, "hw": "ascend_910b2"}
    tiling = {"block_m": 64, "block_n": 128, "block_k": 64, "load_k": load}
    with pytest.raises(
        NpusimError, match=r"gemm\.mmad on aic\.CUBE: npusim cannot read back the text of a sum of several"
    ):
        written_program(Request(schedule="gemm", tiling=tiling, **how))


SMALL: dict[str, Any] = {"seq_q": 128, "seq_kv": 256, "q_heads": 2, "kv_heads": 2, "head_dim": 64}


def test_every_removal_of_a_flag_from_a_text_is_found(tmp_path: Path) -> None:
    """The text has no barriers, and no flag of it is redundant."""
    path = text_of(tmp_path, **SMALL, tiling=TILE | {"depth": 1})
    changed = removals(path.read_text())
    assert len(changed) > 150
    for line, statement, text in changed[::8]:
        without = check_program(written(tmp_path, text, f"without_{line}.py"), "flash")
        assert without.faults, f"{line}: {statement}"


@pytest.mark.parametrize("depth", [0, 1])
def test_a_text_for_every_length_is_proved_and_has_the_bits_at_other_lengths(depth: int, tmp_path: Path) -> None:
    one = SMALL | {"seq_q": 64, "q_heads": 1, "kv_heads": 1}
    path = text_of(tmp_path, "seq_kv=64", **one, tiling=TILE | {"depth": depth})
    assert "def flash(seq_kv=256):" in path.read_text()
    proof = check_every_length(path, "flash", {"seq_kv": 256}, "seq_kv", 64).proof
    assert proof is not None
    assert (proof.reasons, proof.fault) == ((), None)
    tensors = drawn(1, 1, 64, 64), drawn(1, 1, 448, 64, seed=1), drawn(1, 1, 448, 64, seed=2)
    made = read_back(path, {"seq_kv": 448}, *tensors)
    assert np.array_equal(made, packaged(TILE | {"depth": depth}, *tensors))
    with pytest.raises(NpusimError, match=r"seq_kv must be 256, 320, 384, \.\.\."):
        check_program(path, "flash", {"seq_kv": 300})


@pytest.mark.parametrize(
    ("changes", "every", "why"),
    [
        ({"causal": True, "seq_kv": 128}, "", "its blocks have 2 shapes"),
        ({"seq_q": 120}, "", "its blocks have 2 shapes"),
        ({"tiling": {}}, "", "use -t pipeline=block"),
        ({"tiling": {"block_q": 128, "pipeline": "block"}}, "", "for one slice of all rows, set vector_rows="),
        ({"schedule": "pasa"}, "", "pasa: it has several launches"),
        ({"softcap": 30.0}, "", "rows of P on aiv0.VECTOR: tanh of 32 x 64 elements has no TileLang-Ascend word"),
        ({"q_heads": 4}, "", "K.load on aic.MTE2: a coordinate that is not a sum"),
        ({"hw": "h200", "tiling": {}}, "", "--as tilelang: flash on h200 is a program of the family nvidia"),
        ({"precision": "fa2_fp32,exp_variant=exp.libdevice"}, "", "rows of P on aiv0.VECTOR: exp with exp.libdevice"),
        ({"arithmetic": "hopper.wgmma.k16.f16.f32"}, "", "S.mmad on aic.CUBE: matmul with hopper.wgmma.k16.f16.f32"),
        ({"alibi": True}, "", "rows of P on aiv0.VECTOR: add from UB and GM to UB has no TileLang-Ascend text"),
        ({}, "seq_kv", "--every seq_kv: write NAME=STEP"),
        ({}, "heads=1", "NAME is seq, seq_q, seq_kv, batch"),
        ({}, "seq=64", "the problem has no seq"),
        ({}, "seq_kv=32", "one text cannot state seq_kv = 256, 288, ..."),
        ({}, "seq_q=64", "one text cannot state seq_q = 128, 192, ..."),
    ],
)
def test_what_has_no_text_is_refused_by_name(changes: dict[str, Any], every: str, why: str) -> None:
    how = SMALL | {"tiling": TILE} | changes
    with pytest.raises(NpusimError, match=re.escape(why)):
        written_program(request(**how), every=every)


def test_the_command_prints_a_program_that_the_check_passes(tmp_path: Path) -> None:
    sizes = ["--shape", "B1,N2,S256,D64", "--no-causal"]
    tile = [x for name, value in TILE.items() for x in ("-t", f"{name}={value}")]
    made = CliRunner().invoke(app, ["program", "flash", *sizes, *tile, "--as", "tilelang"])
    assert made.exit_code == 0
    head = " ".join(line.removeprefix("# ") for line in made.stdout.splitlines() if line.startswith("#"))
    assert f"Written by npusim {npusim.__version__}: npusim program flash --seq 256 --batch 1" in head
    assert "It does not state the time" in head
    path = written(tmp_path, made.stdout)
    assert CliRunner().invoke(app, ["check", f"{path}::flash"]).exit_code == 0
    for words, message in (
        (["--as", "tilelang", "--json"], "--json"),
        (["--every", "seq_kv=64"], "--every"),
        (["-o", str(path)], "--out"),
        (["--as", "cuda"], "cuda"),
    ):
        refused = CliRunner().invoke(app, ["program", "flash", *sizes, *tile, *words])
        assert refused.exit_code == 2
        assert message in refused.stderr


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (r"(p_slots\[.*?) % 3", r"\1 % 2"),  # a slot is filled again before it is read
        (
            r"row_expand_mul\(o_ub, o_ub, alpha_ub\[.*?\]\)",
            r"row_expand_mul(o_ub, o_ub, m_ub)",
        ),  # a later tile's maximum
        (r"T\.tile\.add\(l_ub, l_ub, l_tile_ub\)", r"T.tile.add(l_ub, l_ub, l_tile_ub); T.copy(pv_ub, o_ub)"),
    ],
)
def test_a_pipeline_whose_parts_share_more_than_slots_is_not_read_as_one_loop(
    old: str, new: str, tmp_path: Path
) -> None:
    text = written_program(request(**SMALL | {"seq_kv": 384}, tiling=TILE | {"depth": 2}))
    changed, count = re.subn(old, new, text)
    assert count >= 2
    (call,) = program_call(written(tmp_path, text), "flash", {})
    assert not call.configurations[0].refused
    (call,) = program_call(written(tmp_path, changed.replace("; ", "\n" + " " * 20), "changed.py"), "flash", {})
    assert "changed.py:" in call.configurations[0].refused
