"""Launches that are wrong: each ends soon and in words that name the launch, or the kernel's file and line."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import npusim
from npusim.config.problem import Problem
from npusim.errors import NpusimError, ProgramError, SpecError
from npusim.kernels.triton import compiler
from npusim.kernels.triton import launch_ways as launches
from npusim.kernels.triton.reader import Reader
from ttir.test_hidden_lanes import _recorded
from ttir.test_plain import KERNELS, NORM, name_of

pytestmark = pytest.mark.usefixtures("without_warp_code")
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: npusim[triton]")
ATTENTION = Path(__file__).parent / "kernels.py"
FA = "plain[cdiv(seq_q, BM), batch * heads](q, k, v, o, scale * log2e, seq_kv, D=head_dim, BM=64, BN=64, CAUSAL=causal)"
ADD = "add[cdiv(n, BLOCK)](tensor(n), tensor(n), tensor(n), n, BLOCK=256)"
BITS = "a whole number of more than 64 bits"
GRID = "allowed: one to three whole numbers from 1, at most 1,048,576 programs in all"
PROBLEM = Problem(batch=1, heads=2, kv_heads=2, seq_q=128, seq_kv=128, head_dim=64, causal=False, dtype="float16")


def added(launch: str, n: int = 1000, **more: Any) -> Any:
    return npusim.run(name_of(launch), problem={"n": n}, hw="h200", **more)


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("[cdiv(n, BLOCK)]", "['a', n]", GRID),
        ("[cdiv(n, BLOCK)]", "[n / BLOCK]", GRID),
        ("[cdiv(n, BLOCK)]", "[tensor(3)]", GRID),
        ("[cdiv(n, BLOCK)]", "[(n,) * 4]", "an operation must have two numbers"),
        ("[cdiv(n, BLOCK)]", "[n, n, n, n]", GRID),
        ("[cdiv(n, BLOCK)]", "[0 * n]", GRID),
        ("[cdiv(n, BLOCK)]", "[n * 10**6]", "1,000,000,000 programs; " + GRID),
        ("[cdiv(n, BLOCK)]", "[2**64]", BITS),
        ("[cdiv(n, BLOCK)]", "[n * 9**9**9]", BITS),
        ("[cdiv(n, BLOCK)]", "[n << 10**9]", BITS),
        ("[cdiv(n, BLOCK)]", "['a' * 10**10]", "an operation must have two numbers"),
        ("[cdiv(n, BLOCK)]", "['%1000000000d' % n]", "an operation must have two numbers"),
        ("[cdiv(n, BLOCK)]", f"[n{' + 1' * 5000}]", "not an expression of at most 300 parts|of more than 300"),
        (
            "[cdiv(n, BLOCK)]",
            f"[n{' + 1' * 300}]",
            r"plain_kernels\.py:\d+: add: grid: the expression has more than 300",
        ),
        ("[cdiv(n, BLOCK)]", f"[{'-' * 5000}n]", "not an expression of at most 300 parts|of more than 300"),
        ("n, BLOCK=", "n + 2**70, BLOCK=", rf"n=n \+ 2 \*\* 70: {BITS}"),
        ("(tensor(n), ", "(*tensor(n), ", r"plain_kernels\.py:\d+: add: arguments are given one by one"),
        ("BLOCK=256", "**n", r"plain_kernels\.py:\d+: add: arguments are given one by one"),
        ("BLOCK=256", "BLOCK=256, num_stages=1000", r"num_stages='1000': allowed: 1, 2, .*, 16"),
        ("BLOCK=256", "BLOCK=256, num_warps='a'", r"num_warps=.*: allowed: 1, 2, 4, 8, 16, 32"),
        ("(tensor(n), ", "(tensor(n).to('int8'), ", "add: X: a pointer to int8; allowed: float16, "),
    ],
)
def test_numbers_programs_and_options_of_a_launch_are_bounded(old: str, new: str, why: str) -> None:
    assert old in ADD
    with pytest.raises(SpecError, match=why):
        added(ADD.replace(old, new, 1))


def test_a_kernels_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    for content, why in (
        (b"\xff\xfe\x00", "not UTF-8 text"),
        (b"x = 1\0", "null bytes|not a Python file"),
        (b"x = (", r":1: "),
    ):
        (tmp_path / "k.py").write_bytes(content)
        with pytest.raises(SpecError, match=rf"k\.py.*{why}"):
            npusim.run(f"{tmp_path}/k.py::{FA}", problem=PROBLEM, hw="h200")


@needs_triton
def test_a_store_beyond_a_tensors_end_is_refused_as_a_load_is() -> None:
    short = ADD.replace("tensor(n), n, BLOCK", "tensor(n - 1), n, BLOCK")
    why = r"plain_kernels\.py:\d+: O: program \(3, 0, 0\) stores up to column 999 of 999, and no mask prevents it"
    with pytest.raises(ProgramError, match=why):
        added(short)
    assert added(ADD).numerics.error.rmse < 5e-4
    with pytest.raises(ProgramError, match=r"Y: program \(3, 0, 0\) reads up to .* 999 of 999"):
        added(ADD.replace("tensor(n), tensor(n), n", "tensor(n - 1), tensor(n), n"))


@needs_triton
def test_a_kernel_that_is_not_read_is_refused_before_code_is_made_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    asked = list[str]()
    monkeypatch.setattr(triton, "compile", lambda *_, **__: asked.append("a launch"))
    monkeypatch.setattr(compiler, "_code_of", lambda *_: asked.append("a recorded call"))
    with pytest.raises(ProgramError, match=r"O: program .* stores up to column 899 of 899"):
        added(ADD.replace("tensor(n), n, BLOCK", "tensor(n - 1), n, BLOCK"), 900)
    call, _ = _recorded("stored_before", {})
    with pytest.raises(ProgramError, match="an if whose condition differs between programs"):
        npusim.run(call, hw="h200")
    assert not asked


@needs_triton
def test_a_second_result_beyond_its_end_is_refused() -> None:
    launch = NORM.format(more="").replace(
        "tensor(R).to('float32'), tensor(R)", "tensor(R - 1).to('float32'), tensor(R)"
    )
    with pytest.raises(ProgramError, match=r"plain_kernels\.py:\d+: Mean: program \(5, 0, 0\) stores up to "):
        npusim.run(name_of(launch), problem={"R": 6, "C": 200}, hw="h200", numerics=False)


@needs_triton
def test_q_and_o_exchanged_are_refused() -> None:
    with pytest.raises(ProgramError, match=r"kernels\.py:\d+: O: the kernel stores to q; .* o is the result"):
        npusim.run(f"{ATTENTION}::{FA.replace('(q, k, v, o', '(o, k, v, q')}", problem=PROBLEM, hw="h200")


@needs_triton
def test_an_option_that_is_a_parameter_too_has_the_value_of_both(tmp_path: Path) -> None:
    (tmp_path / "k.py").write_text(
        KERNELS.read_text().replace("BLOCK: tl.constexpr", "BLOCK: tl.constexpr, num_stages: tl.constexpr", 1)
    )
    launch = ADD.replace("BLOCK=256", "BLOCK=256, num_stages=2")
    result = npusim.run(f"{tmp_path}/k.py::{launch}", problem={"n": 1000}, hw="h200", numerics=False)
    assert (result.tiling.num_stages, result.tiling.stages) == (2, 2)


@needs_triton
@pytest.mark.parametrize("columns", [64, 60])
def test_rows_of_one_iteration_are_normed(columns: int) -> None:
    launch = NORM.replace("layer_norm", "long_norm").format(more=", reference=normed").replace("256", "64")
    result = npusim.run(name_of(launch), problem={"R": 6, "C": columns}, hw="h200", rows="all")
    assert result.numerics.error.rmse < 5e-4


@needs_triton
def test_a_loop_without_an_end_is_refused() -> None:
    launch = NORM.replace("layer_norm", "long_norm").format(more="").replace(", C, 1e-5", ", 2**31, 1e-5")
    with pytest.raises(
        ProgramError,
        match=r"plain_kernels\.py:\d+: a loop has 8,388,608 iterations in one program and .* at most 262,144 and ",
    ):
        npusim.run(name_of(launch), problem={"R": 6, "C": 64}, hw="h200", numerics=False)


@needs_triton
def test_what_no_rule_foresees_is_refused_with_file_and_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def stray(*_: object) -> None:
        raise KeyError("stray")

    monkeypatch.setattr(Reader, "_tt_store", stray)
    with pytest.raises(
        NpusimError, match=r"plain_kernels\.py:1\d: tt\.store: npusim has no rule .* \(KeyError: 'stray'\)"
    ):
        added(ADD)
    monkeypatch.undo()
    monkeypatch.setattr(launches, "read_launch", stray)
    with pytest.raises(NpusimError, match=r"plain_kernels\.py:\d+: add: npusim has no rule"):
        added(ADD)
