"""Registers, spilled ones and shared memory of tiles that nobody listed: what a run takes is what the compiler says."""

from __future__ import annotations

import re
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import npusim
from npusim import cache
from npusim.config.problem import Problem
from npusim.kernels.triton import launch as launches
from npusim.kernels.triton.releases import assembler
from tests.turns import every

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: npusim[triton]")
KERNELS = Path(__file__).with_name("kernels.py")
LAUNCH = (
    "padded[cdiv(seq_q, BM), batch * heads](q, k, v, o, scale * log2e, seq_kv, D=head_dim, "
    "DP=next_power_of_2(head_dim), BM={}, BN={}, num_warps={}, num_stages={})"
)
#: Head size, rows and keys of a tile, warps, stages.
TILES = (
    (96, 64, 64, 4, 2),
    (96, 128, 32, 4, 1),
    (96, 32, 128, 8, 3),
    (96, 16, 16, 4, 4),
    (192, 64, 64, 4, 1),
    (192, 64, 32, 16, 1),
    (192, 128, 32, 8, 2),
    (256, 64, 64, 8, 1),
    (256, 128, 16, 4, 1),
    (256, 32, 32, 8, 2),
)


def said(asm: dict[str, str], folder: Path) -> tuple[int, int]:
    """What the assembler itself says of a kernel's code: registers, and bytes of the stack for spilled ones."""
    source = folder / "kernel.ptx"
    source.write_text(asm["ptx"])
    words = [*assembler(90), "-v", "-lineinfo", "--gpu-name=sm_90a", source, "-o", folder / "kernel.cubin"]
    told = subprocess.run(words, check=True, capture_output=True, text=True).stderr
    registers, stack = re.search(r"Used (\d+) registers", told), re.search(r"(\d+) bytes stack frame", told)
    assert registers
    assert stack
    return int(registers[1]), int(stack[1])


@pytest.mark.parametrize("tile", every(2, (pytest.param(t, id="x".join(map(str, t))) for t in TILES)))
def test_an_unlisted_tile_has_the_compilers_registers(
    tile: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import triton

    made: list[Any] = []
    code: list[Any] = []
    asked, compile_ = launches.compiled, triton.compile
    monkeypatch.setattr(triton, "compile", lambda *a, **k: code.append(compile_(*a, **k)) or code[-1])
    monkeypatch.setattr(launches, "compiled", lambda *a: made.append(asked(*a)) or made[-1])
    kept = cache.load
    monkeypatch.setattr(cache, "load", lambda name, *a: None if name.endswith(".triton") else kept(name, *a))
    head_dim, *rest = tile
    problem = Problem(heads=2, seq_q=256, head_dim=head_dim)
    result = npusim.run(f"{KERNELS}::{LAUNCH.format(*rest)}", problem=problem, hw="h200", numerics=False)
    registers, stack = said(code[0].asm, tmp_path)
    assert (made[0].registers, 4 * made[0].spilled, made[0].shared_bytes) == (registers, stack, code[0].metadata.shared)
    note = next(n for n in result.notes if "registers of the compiler" in n)
    assert f"{registers} registers per thread" in note
    assert (f", {stack // 4} spilled" in note) == bool(stack)
