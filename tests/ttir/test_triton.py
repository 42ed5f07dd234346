"""Kernels of Triton as schedules: bits against an interpreter of their TTIR and against silicon, time, and refusals."""

from __future__ import annotations

import csv
import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from typer.testing import CliRunner

import npusim
from npusim.cli.app import app
from npusim.config.problem import Problem
from npusim.errors import NpusimError, ProgramError, SpecError
from npusim.kernels.triton import compiler, releases
from npusim.kernels.triton import launch as launches
from npusim.kernels.triton.ttir_text import read
from npusim.program.numerics.input_tensors import drawn_source
from npusim.simulation.request import Request
from tests.turns import in_turn
from ttir.interpreter import Open, interpret
from ttir.marks import as_measured, needs_block_pointers

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: npusim[triton]")
HERE = Path(__file__).parent
KERNELS = HERE / "kernels.py"
SIZES = "q, k, v, o, scale * log2e, seq_kv, D=head_dim"
GRID = "[cdiv(seq_q, BM), batch * heads]"
ATTENTION = {
    "plain": f"plain{GRID}({SIZES}, BM=64, BN=64, CAUSAL=causal)",
    "twice": f"twice{GRID}({SIZES}, BM=64, BN=32)",
    "capped": f"capped{GRID}(q, k, v, o, scale, seq_kv, 20.0, 100, D=head_dim, BM=64, BN=32)",
    "described": f"described{GRID}({SIZES}, B=0, BM=64, BN=32)",
}


def name_of(kernel: str) -> str:
    return f"{KERNELS}::{ATTENTION[kernel]}"


def attention(seq: int, **more: Any) -> Problem:
    return Problem(heads=2, seq_q=seq, head_dim=64, **more)


AS_WRITTEN = [
    pytest.param("plain", attention(250), id="ragged"),
    pytest.param("plain", attention(128, causal=True), id="causal"),
    pytest.param("plain", attention(64, causal=True), id="one tile"),
    pytest.param("twice", attention(256, causal=True), id="two loops"),
    pytest.param("twice", attention(64, causal=True), id="a loop that nobody enters, two tiles"),
    pytest.param("capped", attention(256, causal=True, softcap=20.0, window=100), id="soft-cap, window"),
    pytest.param("described", attention(128), id="block pointers", marks=needs_block_pointers),
]


@needs_triton
@pytest.mark.parametrize(("kernel", "problem", "hw"), in_turn(AS_WRITTEN, ("h200", "ascend_910b2")))
def test_kernels_as_users_write_them_compute_attention(kernel: str, problem: Problem, hw: str) -> None:
    result = npusim.run(name_of(kernel), problem=problem, hw=hw, rows="all", heads="all")
    assert result.numerics.error.rmse < 4e-4
    assert result.cycles > 0


@needs_triton
@pytest.mark.parametrize("hw", ["h200", "ascend_910b2"])
def test_what_one_launch_leaves_the_next_one_reads(hw: str) -> None:
    """Keys halved by a kernel before: attention of scores with half the scale, which is exact."""
    problem = attention(256, causal=True)
    before = (
        "halved[seq_kv // B, batch * kv_heads](k, workspace(batch, kv_heads, seq_kv, head_dim), seq_kv, head_dim, B=64)"
    )
    last = ATTENTION["plain"].replace("(q, k,", "(q, Y,").replace("scale * log2e", "2 * scale * log2e")
    two = npusim.run(f"{KERNELS}::{before}; {last}", problem=problem, hw=hw)
    one = npusim.run(name_of("plain"), problem=problem, hw=hw)
    assert np.array_equal(two.output[two.numerics.computed], one.output[one.numerics.computed])
    assert [p.name for p in two.program.phases] == ["halved 1", "plain"]
    assert two.latency_us > one.latency_us


@needs_triton
def test_rows_that_see_nothing_of_a_first_tile_are_nan_as_on_silicon(tmp_path: Path) -> None:
    """-Inf less -Inf: an H100 gives these 122 rows of each head (Triton 3.6)."""
    path = tmp_path / "kernels.py"
    path.write_text(KERNELS.read_text().replace("-1.0e30", 'float("-inf")'))
    problem = attention(256, causal=True, softcap=20.0, window=100)
    call: dict[str, Any] = {"problem": problem, "hw": "h200", "rows": "all", "heads": "all"}
    output = npusim.run(f"{path}::{ATTENTION['capped']}", **call).output
    rows = [np.flatnonzero(np.isnan(head).any(-1)) for head in output[0].astype(np.float32)]
    assert [(len(n), n[0], n[-1]) for n in rows] == [(122, 131, 255)] * 2


@needs_triton
@pytest.mark.parametrize("hw", ["h200", "ascend_910b2"])
def test_a_left_factor_may_be_transposed(hw: str) -> None:
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((1, 2, n, 64)).astype(np.float16) for n in (64, 256, 256))
    problem, tensors = Problem(heads=2, seq_q=64, seq_kv=256, head_dim=64), {"q": q, "k": k, "v": v}
    name = f"{KERNELS}::state[batch * heads](k, v, o, seq_kv, D=head_dim, B=64)"
    result = npusim.run(name, problem=problem, hw=hw, rows="all", heads="all", tensors=tensors)
    state = np.einsum("bhtd,bhte->bhde", k.astype(np.float64), v.astype(np.float64))
    assert np.allclose(result.output, state, rtol=1e-3, atol=1e-3)


@needs_triton
@pytest.mark.parametrize(
    ("hw", "how", "precision"),
    [
        (
            "h200",
            Open("hopper.mma.k16.f16.f32", "mma_lanes", "", "hopper_ex2", functions="cuda"),
            "unfused,sum_order=mma_lanes",
        ),
        ("ascend_910b2", Open("ascend.cube.k16.f16.f32", "vector_lanes", "correct", "", is_fresh=True), None),
        ("ascend_950", Open("ascend.cube.k16.f16.f32", "four_chains", "correct", "", is_fresh=True), None),
    ],
)
def test_bits_equal_an_interpreter_of_the_ttir(
    hw: str, how: Open, precision: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, compiled = [], launches.compiled
    monkeypatch.setattr(launches, "compiled", lambda *a: made.append(compiled(*a)) or made[-1])
    problem = attention(100)
    result = npusim.run(name_of("plain"), problem=problem, hw=hw, rows="all", heads="all", precision=precision)
    draw = drawn_source(problem)
    memory = {n.upper(): np.concatenate([draw(n, 0, h).ravel() for h in range(2)]) for n in "qkv"}
    memory["O"] = np.zeros(2 * 100 * 64, np.float16)
    scale = problem.scale * np.log2(np.e)
    arguments = {**dict.fromkeys("QKVO"), "sc": float(scale), "S": 100}
    interpret(made[0].ttir, arguments, (2, 2), memory, how)
    assert np.array_equal(result.output.ravel().view(np.uint16), memory["O"].view(np.uint16))


@needs_triton
@pytest.mark.parametrize("case", ["flash/normal_d128", "flash/smollm2_causal", "fp8/smollm2_s256_fwd_fresh"])
@as_measured
def test_measured_kernels_equal_silicon_in_every_bit(case: str, shared_folder: Path) -> None:
    """With what the vectors fix: exponentials by a polynomial, row sums left to right, nothing contracted."""
    with np.load(shared_folder / "golden" / "attention_h200.npz") as golden:
        is_fp8, inputs, factor = case.startswith("fp8"), str(golden[f"{case}/inputs"]), float(golden[f"{case}/c"])
        kind = ml_dtypes.float8_e4m3fn if is_fp8 else np.float16
        tensors = {n: golden[f"inputs/{inputs}/{n}"].view(kind)[None] for n in "qkv"}
        wanted, causal = golden[f"{case}/o"], not is_fp8 and bool(golden[f"{case}/causal"])
    if is_fp8:  # its heads share no keys
        tensors |= {n: np.repeat(tensors[n], 3, 1) for n in "kv"}
        arguments = f"q, k, v.T, o.to('float32'), {factor!r}, 256.0, seq_kv, D=head_dim"
        launch = f"fp8{GRID}({arguments}, BM=64, BN=64, FRESH=True, ST=2)"
    else:
        launch = f"fa{GRID}(q, k, v, o, {factor!r}, seq_kv, group, D=head_dim, BM=64, BN=64, CAUSAL=causal, ST=2)"
    result = npusim.run(
        f"{shared_folder / 'measurements' / 'h200_kernels.py'}::{launch}",
        tensors=tensors,
        causal=causal,
        hw="h200",
        rows="0-255" if is_fp8 else "all",
        heads="all",
        precision="unfused,exp_variant=exp2.exp2p,functions=correct,sum_order=sequential",
    )
    got = result.output[0][:, : wanted.shape[1]]
    assert np.array_equal(np.ascontiguousarray(got).view(wanted.dtype), wanted)


@needs_triton
def test_an_imported_kernel_takes_as_long_as_our_own_of_the_same_tile(shared_folder: Path) -> None:
    kernel = f"{shared_folder / 'measurements' / 'h200_kernels.py'}::fa"
    launch = f"{GRID}(q, k, v, o, scale * log2e, seq_kv, group, D=head_dim, BM=64, BN=64, CAUSAL=causal, ST=2)"
    for causal in (False, True):
        call: dict[str, Any] = {"problem": attention(1024, causal=causal), "hw": "h200", "numerics": False}
        ours = npusim.run("flash", tiling={"block_q": 64, "block_kv": 64, "stages": 2, "warps": 4}, **call)
        theirs = npusim.run(npusim.triton(kernel, launch), **call)
        # Its loop is timed by its machine code, ours by the steps of a kernel that nobody compiled.
        assert theirs.cycles == pytest.approx(ours.cycles, rel=0.06)


@needs_triton
@pytest.mark.parametrize("accumulate", ["fresh", "chained"])
@pytest.mark.parametrize(("rows", "keys", "stages", "warps"), [(128, 128, 3, 8), (64, 128, 2, 4)])
def test_so_does_one_in_fp8_whose_compiler_contracts(
    shared_folder: Path, accumulate: str, rows: int, keys: int, stages: int, warps: int
) -> None:
    kernel, is_fresh = f"{shared_folder / 'measurements' / 'h200_kernels.py'}::fp8", accumulate == "fresh"
    arguments = "q, k, v.T, o.to('float32'), scale * log2e, 256.0, seq_kv, D=head_dim"
    launch = f"{GRID}({arguments}, BM={rows}, BN={keys}, FRESH={is_fresh}, ST={stages})"
    problem = Problem(heads=16, seq_q=2048, head_dim=128, dtype="float8_e4m3fn")
    call: dict[str, Any] = {"problem": problem, "hw": "h200", "numerics": False}
    tiling = {"block_q": rows, "block_kv": keys, "stages": stages, "warps": warps}
    precision = f"accumulate={accumulate},scale=256,multiply_add=once"
    ours = npusim.run("fp8_attention", tiling=tiling, precision=precision, **call)
    theirs = npusim.run(npusim.triton(kernel, launch), tiling={"warps": warps}, **call)
    # As above: machine code of one, steps of the other.
    assert theirs.cycles == pytest.approx(ours.cycles, rel=0.12)


@needs_triton
@needs_block_pointers
def test_registers_are_those_that_the_compiler_says() -> None:
    result = npusim.run(name_of("described"), problem=attention(128), hw="h200", numerics=False, tiling={"BN": 64})
    assert any(
        "registers per thread" in n and f"registers of the compiler (Triton {releases.release()}, ptxas " in n
        for n in result.notes
    )
    assert result.tiling.BN == 64


@needs_triton
@as_measured
def test_the_compiler_says_what_the_chip_reported(shared_folder: Path) -> None:
    with (shared_folder / "measurements" / "h200_registers.csv").open() as file:
        rows = [
            r for r in csv.DictReader(file) if r["schedule"] == "flash" and r["registers_per_thread"] and r["stages"]
        ]
    kernel = compiler.source_of(str(shared_folder / "measurements" / "h200_kernels.py"), "fa", 0)
    for r in rows[:: len(rows) // 8]:
        sizes = {"D": (int(r["head_dim"]),), "BM": (int(r["block_q"]),), "BN": (int(r["block_kv"]),)}
        more = {"sc": 0.1, "S": 4096, "G": 1 if r["dtype"] == "float16" else 7}
        arguments = {**dict.fromkeys("QKVO", r["dtype"]), **more, **sizes}
        arguments |= {"CAUSAL": (r["causal"] == "True",), "ST": (int(r["stages"]),)}
        made = compiler.compiled(kernel, "sm_90", arguments, {"num_warps": int(r["warps"])})
        said = tuple(int(r[n] or 0) for n in ("registers_per_thread", "spilled_registers", "shared_bytes"))
        assert (made.registers, made.spilled, made.shared_bytes) == said


@needs_triton
@as_measured
def test_spilled_registers_are_counted_in_the_loop(shared_folder: Path) -> None:
    """As the code that was measured has them: 128 x 128 keeps twelve in local memory, and its loop needs none."""
    with (shared_folder / "measurements" / "h200_loop_counts.csv").open() as file:
        rows = [r for r in csv.DictReader(file) if r["kernel"] == "flash_bfloat16" and r["block_q"] == "128"]
    kernel = compiler.source_of(str(shared_folder / "measurements" / "h200_kernels.py"), "fa", 0)
    for r in [r for r in rows if r["block_kv"] != "32" and r["warps"] == "4"]:
        sizes = {"D": (128,), "BM": (128,), "BN": (int(r["block_kv"]),), "ST": (int(r["stages"]),), "CAUSAL": (False,)}
        arguments = {**dict.fromkeys("QKVO", "bfloat16"), "sc": 0.1, "S": 4096, "G": 7, **sizes}
        made = compiler.compiled(kernel, "sm_90", arguments, {"num_warps": 4})
        instructions = int(r["LDL"]) + int(r["STL"])  # of one, two or four registers each
        assert instructions <= made.moved <= 4 * instructions


def test_a_wide_access_moves_several_registers() -> None:
    sass = """
        /*0010*/                   LDL.64 R8, [R1+0x8] ;
        /*0020*/                   LDL.LU.128 R10, [R1+0x188] ;
        /*0030*/                   HGMMA.64x64x16.F32 R24, gdesc[UR4], R24 ;
        /*0040*/              @!P0 STL [R1+0x14], R8 ;
        /*0050*/              @P0  BRA 0x20 ;
        /*0060*/                   STL.64 [R1+0x14], R8 ;
    """
    assert compiler._moved(sass) == 4 + 1


@needs_triton
@needs_block_pointers
def test_a_search_takes_constexprs_and_warps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--no-causal", "--seq", "128", "-w", "pangu_38b", "--tp", "8", "--hw", "h200", "-j1"]
    done = CliRunner().invoke(app, ["explore", name_of("described"), "-f", "BM=64,128", "-f", "warps=4,8", *words])
    assert done.exit_code == 0, done.stderr
    (file,) = (tmp_path / "runs").glob("*.csv")
    assert file.name.startswith("explore-described-pangu_38b-128-h200")
    assert {(r["BM"], r["warps"]) for r in csv.DictReader(file.open())} == {(m, w) for m in ("64", "128") for w in "48"}


@needs_triton
def test_a_launch_is_one_word_of_a_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside our own: the parts have the same names, and what masks every tile is in the rows of P."""
    monkeypatch.chdir(tmp_path)
    words = [
        name_of("plain").replace("log2e", f"log2e{' * 1' * 80}"),
        "flash -t block_q=64,block_kv=64,depth=2",
        "--hw",
        "ascend_910b2",
        "--seq",
        "256",
    ]
    done = CliRunner().invoke(app, ["compare", *words, "-w", "pangu_38b", "--tp", "8", "--json"])
    assert done.exit_code == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["runs"] == [f"{KERNELS}::plain", words[1]]
    parts = {part["name"]: part["cycles"] for part in document["latency"]["parts"]}
    assert min(*parts["rows of P"], *parts["update"], *parts["finish"]) > 0


@needs_triton
@needs_block_pointers
def test_masks_other_than_the_problems_are_noted() -> None:
    result = npusim.run(name_of("described"), problem=attention(128, causal=True), hw="h200", numerics=False)
    assert any("the kernel's masks decide which keys a query sees" in n for n in result.notes)


@needs_triton
def test_the_options_of_a_launch_are_part_of_the_name() -> None:
    request = Request(
        f"{KERNELS}::plain",
        args="q,k,v,o,scale*log2e,seq_kv",
        grid="cdiv(seq_q, BM), batch*heads",
        constexpr="D=head_dim,BM=64,BN=64,CAUSAL=causal",
        num_warps=8,
    )
    assert request.schedule.endswith("CAUSAL=causal, num_warps=8)")
    assert request.args is None
    with pytest.raises(SpecError, match="num_warps: options of a Triton kernel"):
        Request("flash", num_warps=8)


#: Why, by what is changed in a kernel: the words of the refusal, the kernel, and its text before and after.
REFUSED = {
    "a load beyond the end": (
        "and no mask prevents it",
        "plain",
        "        k = tl.load(kp, mask=(j + rn)[None] < S, other=0.0)",
        "        k = tl.load(kp)",
    ),
    "a function of a library": (
        "the libdevice function __nv_sinhf is not supported; allowed: __nv_ceilf, .*__nv_tanhf",
        "capped",
        "        mn = ",
        "        s = tl.extra.libdevice.sinh(s)\n        mn = ",
    ),
    "atomics": (
        "a kernel may have only one tl.atomic_add",
        "capped",
        "    tl.store(O + off",
        "    tl.atomic_add(O, 1.0)\n    tl.store(O + off",
    ),
    "a condition on values": (
        "arith.muli of integers of 64 bits that are values of a tile",
        "capped",
        "        mn = ",
        "        s = tl.where((s > 0).to(tl.int64) * 3 > 1, s, 0.0)\n        mn = ",
    ),
    "an address that is loaded": (
        "a load of one element of K",
        "plain",
        "    m = tl.full",
        "    S = tl.load(K).to(tl.int32)\n    m = tl.full",
    ),
}


@needs_triton
@pytest.mark.parametrize("why", REFUSED)
def test_what_has_no_counterpart_is_refused_at_its_line(why: str, tmp_path: Path) -> None:
    words, kernel, old, new = REFUSED[why]
    text, problem = KERNELS.read_text(), attention(200 if kernel == "plain" else 128)
    assert old in text
    path = tmp_path / "kernels.py"
    path.write_text(text.replace(old, new))
    with pytest.raises(NpusimError, match=rf"kernels\.py:\d+: .*({words})"):
        npusim.run(f"{path}::{ATTENTION[kernel]}", problem=problem, hw="h200", numerics=False)


@needs_triton
def test_the_same_text_in_another_file_is_refused_there(tmp_path: Path) -> None:
    """Triton's own cache knows a kernel by its text, and has the file it met it in first."""
    _, kernel, old, new = REFUSED["a load beyond the end"]
    for name in ("first.py", "second.py"):
        (tmp_path / name).write_text(KERNELS.read_text().replace(old, new))
        with pytest.raises(NpusimError, match=rf"{name}:\d+: K: program"):
            npusim.run(f"{tmp_path / name}::{ATTENTION[kernel]}", problem=attention(200), hw="h200", numerics=False)


@needs_triton
def test_a_grid_that_leaves_outputs_unwritten_is_refused() -> None:
    launch = ATTENTION["plain"].replace("cdiv(seq_q, BM)", "1")
    with pytest.raises(
        ProgramError, match=r"kernels\.py:\d+: O: the grid of 1x2x1 programs writes 128 of 256 rows, 128 of"
    ):
        npusim.run(f"{KERNELS}::{launch}", problem=attention(128), hw="h200", numerics=False)


def test_names_of_negative_constants_are_names() -> None:
    """As Triton calls what it folds: a window's `- W + 1`."""
    body = "%c-255_i32 = arith.constant -255 : i32\n%0 = arith.addi %x, %c-255_i32 : i32\ntt.return\n}\n}"
    function = read(f"module {{\ntt.func public @f(%x: i32) attributes {{noinline = false}} {{\n{body}")
    assert [(o.results, o.operands) for o in function.operations[:2]] == [
        (["c-255_i32"], []),
        (["0"], ["x", "c-255_i32"]),
    ]


def test_without_triton_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def missing(_: str) -> str:
        raise releases.PackageNotFoundError

    shutil.copy(KERNELS, tmp_path / "fresh.py")
    monkeypatch.setattr(releases, "version", missing)
    call: dict[str, Any] = {"problem": attention(128), "hw": "h200", "numerics": False}
    with pytest.raises(SpecError, match=r"Triton is not installed.*npusim\[triton\]"):
        npusim.run(f"{tmp_path}/fresh.py::{ATTENTION['plain']}".replace("BN=64", "BN=16"), **call)
    monkeypatch.setattr(releases, "version", lambda _: "2.1.0")
    with pytest.raises(SpecError, match=r"Triton 2\.1\.0: npusim cannot read its TTIR; install release 3\.6"):
        npusim.run(f"{tmp_path}/fresh.py::{ATTENTION['plain']}".replace("BN=64", "BN=16"), **call)


@pytest.mark.parametrize(
    ("launch", "why"),
    [
        ("plain", "a launch needs its grid and arguments"),
        ("nothing[1](q)", "there is no kernel 'nothing'; the file's functions with @triton.jit: plain, inner"),
        ("plain[1](q, k, v, o)", "parameter sc has no argument"),
        ("plain[1](q, k, v, o, 1.0, seq, D=64, BM=64, BN=64, CAUSAL=False)", "no 'seq'; allowed names: BM,"),
        ("plain[1](q, k, v, o, 1.0, 1, D=64, BM=64, BN=64, CAUSAL=False, X=1)", "has no parameter X"),
        ("plain[1](q, k, v, o, 1.0, 1, D=64, BM=64, BM=32, BN=64)", "BM has two values, 64 and 32; write one"),
        ("plain[1](q, k, v, o, 1.0, 1, Q=k)", "Q has two values, q and k; write one"),
        (
            "plain[0](q, k, v, o, 1.0, 1, D=64, BM=64, BN=64, CAUSAL=False)",
            "grid=0; allowed: one to three whole numbers from 1",
        ),
        ("plain[1](q.real, k, v, o, 1.0, 1, D=64, BM=64, BN=64, CAUSAL=False)", "of names of the problem"),
    ],
)
def test_a_launch_that_does_not_fit_is_refused(launch: str, why: str) -> None:
    with pytest.raises((SpecError, ProgramError), match=why):
        npusim.run(f"{KERNELS}::{launch}", problem=attention(128), hw="h200", numerics=False)


@pytest.mark.parametrize(("sizes", "named"), [((72, 64), "head_dim: 72"), ((64, 72), "value_head_dim: 72")])
def test_a_launch_names_the_head_size_that_is_no_multiple_of_16(sizes: tuple[int, int], named: str) -> None:
    problem = Problem(heads=1, seq_q=64, head_dim=sizes[0], value_head_dim=sizes[1])
    with pytest.raises(SpecError, match=f"^{named} is not a multiple of 16"):
        launches.names_of(problem)
