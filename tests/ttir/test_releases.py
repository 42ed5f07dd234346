"""Differences between releases of Triton: as text, and where one is installed its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import npusim
from npusim.errors import SpecError
from npusim.formats.reductions import reduce_sum
from npusim.kernels.triton import compiler, releases
from npusim.kernels.triton.ttir_text import read
from npusim.studies.tune import hooks

if TYPE_CHECKING:
    from pathlib import Path

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: npusim[triton]")
FIRST = """tt.func public @f(%a: !tt.tensordesc<tensor<64x64xf16>>, %a_shape_0: i32, %a_stride_1: i64) {
  %c = tt.make_tensor_descriptor %C, [%M, %K], [%k, %c1_i64] : <f16>, <tensor<64x64xf16>>
  %x = tt.descriptor_load %a[%p, %c0_i32] : !tt.tensordesc<tensor<64x64xf16>> -> tensor<64x64xf16>"""
LATER = (
    FIRST.replace("tensordesc<tensor<64x64xf16>>", "tensordesc<64x64xf16>")
    .replace("<f16>, <tensor<64x64xf16>>", "<f16>, <64x64xf16>")
    .replace("%a_shape_0", "%a.shape.0")
    .replace("%a_stride_1", "%a.stride.1")
)
KERNEL = """module {
  tt.func public @f(%a: !tt.tensordesc<64x64xf16>, %a.shape.0: i32, %a.stride.1: i64) attributes {noinline = false} {
    %b = arith.addi %a.shape.0, %a.shape.0 : i32
    tt.return
  }
}"""


def installed(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(releases, "version", lambda _: release)


def test_descriptors_of_every_release_are_read_as_those_of_the_first() -> None:
    assert releases.as_first(LATER) == releases.as_first(FIRST) == FIRST
    function = read(KERNEL)
    assert list(function.parameters) == ["a", "a_shape_0", "a_stride_1"]
    assert function.operations[0].operands == ["a_shape_0", "a_shape_0"]


@pytest.mark.parametrize(("release", "wanted"), [("3.7.1", FIRST), ("3.9.0", LATER)])
def test_text_is_compiled_in_the_form_of_the_installed_release(
    release: str, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(release, monkeypatch)
    plain = wanted.replace("%a.shape.0", "%a_shape_0").replace("%a.stride.1", "%a_stride_1")
    assert releases.as_installed(FIRST) == releases.as_installed(LATER) == plain


@needs_triton
def test_older_releases_are_refused_and_newer_ones_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    for release in ("3.5.1", "2.1.0"):
        installed(release, monkeypatch)
        with pytest.raises(
            SpecError, match=rf"Triton {release}: npusim cannot read its TTIR; install release 3\.6 or later"
        ):
            releases.release()
    for release in ("3.6.0", "3.9.1", "3.10.0+git1", "4.0"):
        installed(release, monkeypatch)
        assert releases.release() == release
        assert bool(releases.untried()) == (release[:3] not in ("3.6", "3.9"))
    installed("3.10.0", monkeypatch)
    triton = pytest.importorskip("triton")
    for contracts in (False, True):
        monkeypatch.setattr(triton.knobs.language, "default_fp_fusion", contracts)
        does = "contracts" if contracts else "does not fuse"
        why = r"Triton 3.10.0: npusim was not tested with it (tested: 3.6 to 3.9); by default it"
        assert releases.untried() == f"{why} {does} multiplications and additions"
        assert releases.fused({})["enable_fp_fusion"] is contracts
        assert releases.fused({"enable_fp_fusion": 1})["enable_fp_fusion"] == 1
    result = npusim.run(calls_of(), hw="h200", numerics=False)
    assert any(n.startswith("Triton 3.10.0: npusim was not tested with it") for n in result.notes)


def calls_of() -> Any:
    from ttir import sentence_kernels

    x = np.zeros(256, np.float32)
    with npusim.record() as calls:
        sentence_kernels.of_numbers[(4,)](x, x.copy(), B=64)
    return calls[0]


@needs_triton
def test_a_result_names_the_release_and_its_assembler() -> None:
    result = npusim.run(calls_of(), hw="h200", numerics=False)
    assert any(f"of the compiler ({releases.assembler_of('sm_90')})" in n for n in result.notes)
    assert releases.assembler_of("sm_90").startswith(f"Triton {releases.release()}, ptxas 1")


class Tuner:
    """An autotuner that measures each configuration, as Triton's do."""

    def _bench(self, *_: object, **__: object) -> list[float]:
        return [5.0, 5.0, 5.0]


@needs_triton
@pytest.mark.parametrize("release", ["3.6.0", "3.8.0"])
def test_a_single_configuration_answers_for_no_later_key(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(release, monkeypatch)
    tuner, pruner = Tuner(), hooks.Pruner("h200", top=1)
    pruner._tuner = tuner
    monkeypatch.setattr(hooks.Pruner, "_left", lambda _self, _tuner, configs, *_: configs)
    assert pruner([1], {}) == [1]
    if release == "3.6.0":
        assert tuner._bench() == [0.0, 0.0, 0.0]
    assert tuner._bench() == [5.0, 5.0, 5.0]
    pruner([1], {})  # whose time a tuner with results on disk, or of 3.8, does not ask for
    pruner([1, 2], {})
    assert tuner._bench() == [5.0, 5.0, 5.0]


@needs_triton
def test_the_end_of_a_command_reports_no_leaks(tmp_path: Path) -> None:
    calls = npusim.kernels.triton.calls.Calls([calls_of()]).save(tmp_path / "calls.npz")
    words = [sys.executable, "-m", "npusim", "run", str(calls), "--hw", "h200", "--no-save"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert "leaked" not in done.stderr


@needs_triton
@pytest.mark.parametrize("n", [1000, 1024])
def test_a_thread_adds_its_own_elements_in_the_order_of_the_release(n: int) -> None:
    """The additions of a thread before its first exchange with another one, in PTX."""
    from ttir import sentence_kernels

    x = np.zeros((8, n), np.float32)
    with npusim.record() as calls:
        sentence_kernels.one_sum[(8,)](x, x[:, 0].copy(), 8, n, XBLOCK=1, RBLOCK=1024, num_warps=1)
    (first,) = calls[0].configurations
    code = compiler._code_of(first.ttir, "sm_90", first.options)
    values: dict[str, Any] = {}
    for line in code.ptx.splitlines():
        if "ld.global" in line:
            for name in re.findall(r"%r\d+", line.partition("[")[0]):
                values[name] = np.float32(np.random.default_rng(len(values)).standard_normal())
        elif found := re.search(r"add(?:\.rn)?\.f32\s+(%r\d+), (%r\d+), (%r\d+)", line):
            own = list(values.values())[:32]
            values[found[1]] = values[found[2]] + values[found[3]]
        elif found := re.search(r"shfl\.sync\.bfly\.b32\s+%r\d+, (%r\d+)", line):
            break
    (order,) = compiler.compiled_text(first.ttir, "sm_90", first.options).orders.values()
    assert order.startswith("trees_" if releases.adds_in_trees() else "lanes_")
    alone = order.partition("_")[0] + "_1x1x1"
    assert found
    assert values[found[1]] == reduce_sum(np.array(own), "float32", alone)
    assert len({float(reduce_sum(np.array(own), "float32", f"{how}_1x1x1")) for how in ("trees", "lanes")}) == 2


@needs_triton
def test_one_compiler_serves_several_kernels_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    from ttir import sentence_kernels

    x = np.zeros((8, 64), np.float32)
    with npusim.record() as calls:
        for block in (64, 128):
            sentence_kernels.one_sum[(8,)](x, x[:, 0].copy(), 8, 64, XBLOCK=1, RBLOCK=block, num_warps=1)
    asked = [call.configurations[0] for call in calls]
    codes = [compiler._code_of(each.ttir, "sm_90", each.options) for each in asked]
    (first,) = compiler._idle(os.getpid())
    assert compiler._code_of(asked[0].ttir, "sm_90", asked[0].options) == codes[0] != codes[1]
    assert compiler._idle(os.getpid()) == [first]
    monkeypatch.setenv("PYTEST_CURRENT_TEST", "another test")
    assert compiler._code_of(asked[0].ttir, "sm_90", asked[0].options) == codes[0]
    assert compiler._idle(os.getpid()) == [first]
    with pytest.raises(SpecError, match=r"TTIR: Triton's compiler stops|cannot compile for"):
        compiler._code_of("", "sm_90", asked[0].options)
    monkeypatch.setenv("NPUSIM_TESTS", "another environment")
    assert compiler._code_of(asked[0].ttir, "sm_90", asked[0].options) == codes[0]
    assert first not in compiler._idle(os.getpid())
