"""The bounded check of flags: published faults and their mended forms, removals, mends, refusals."""

from __future__ import annotations

from json import loads
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from npusim.cli.app import app
from npusim.errors import SpecError
from npusim.studies.flags import check_program
from tests.tile_language.flag_programs import FLASH, ONE_CORE, PUBLISHED, program, removals, written

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_faults_are_found_and_their_mended_forms_pass(name: str, tmp_path: Path) -> None:
    text, parameters, faulty, mended, kinds = PUBLISHED[name]
    in_order = name != "barrier in a branch"
    bad = written(tmp_path, program(text, parameters, faulty), "bad.py")
    report = check_program(bad, "kernel", vector_in_order=in_order)
    assert {x.fault.kind for x in report.faults} == kinds
    good = written(tmp_path, program(text, parameters, mended), "good.py")
    assert not check_program(good, "kernel", vector_in_order=in_order).faults


def test_a_race_has_its_lines_bytes_iteration_and_mend(tmp_path: Path) -> None:
    text, parameters, faulty, _, _ = PUBLISHED["reused L1"]
    bad = program(text, parameters, faulty)
    (found,) = [x for x in check_program(written(tmp_path, bad), "kernel").faults if x.fault.kind == "race"]
    lines = bad.splitlines()
    assert found.fault.first is not None
    assert found.fault.second is not None
    assert "gemm_v0" in lines[found.fault.first.line - 1]
    assert "T.copy(A" in lines[found.fault.second.line - 1]
    assert "a[0:64, 0:64] (L1 of C, 8,192 bytes)" in found.fault.text
    assert (found.fault.first.run, found.fault.second.run) == (1, 2)
    assert found.mend.startswith('T.set_flag("MTE1", "MTE2", 0) after line')
    assert "once at the start of C" in found.mend


def test_both_answers_of_a_condition_are_walked(tmp_path: Path) -> None:
    text, parameters, faulty, _, _ = PUBLISHED["barrier in a branch"]
    path = written(tmp_path, program(text, parameters, faulty))
    (found,) = check_program(path, "kernel", vector_in_order=False).faults
    assert found.answers == "size > 0 is False"
    assert found.mend == f'T.pipe_barrier("V") before line {found.fault.second.line}'  # type: ignore[union-attr]


def test_every_removal_of_a_flag_is_found_or_the_barrier_is_redundant(tmp_path: Path) -> None:
    whole = check_program(written(tmp_path, FLASH), "flash")
    assert not whole.faults
    changed = removals(FLASH)
    assert len(changed) == 54
    kinds = dict[int, set[str]]()
    for line, _, text in changed:
        report = check_program(written(tmp_path, text, f"without_{line}.py"), "flash")
        kinds[line] = {x.fault.kind for x in report.faults}
    passing = [line for line, found in kinds.items() if not found]
    assert passing == list(whole.redundant)
    assert [line for line, text, _ in changed if line in passing and "barrier" not in text] == []
    assert sum("race" in found for found in kinds.values()) >= 20


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("out_idx=[3]", "out_idx=[3], pass_configs={'TL_ASCEND_AUTO_SYNC': True}", "TL_ASCEND_AUTO_SYNC"),
        ("for t in T.serial(tiles)", "for t in T.Pipelined(tiles)", "T.Pipelined loop: the compiler adds the flags"),
        ("T.tile.exp(", "T.tile.unheard_of(", "npusim has no rule for T.tile.unheard_of"),
        ("T.copy(Q, q)", "T.copy(Q, o)", "npusim has no rule for a copy from GM to L0C"),
        ('T.set_flag("V", "MTE2", 0)', 'T.set_flag("V", "MTE9", 0)', "pipe 'MTE9'; allowed"),
    ],
)
def test_what_the_text_does_not_show_is_refused_by_line(old: str, new: str, message: str, tmp_path: Path) -> None:
    assert old in FLASH
    with pytest.raises(SpecError, match=r"program\.py:\d+: ") as error:
        check_program(written(tmp_path, FLASH.replace(old, new, 1)), "flash")
    assert message in str(error.value)


def test_arguments_are_checked(tmp_path: Path) -> None:
    path = written(tmp_path, FLASH.replace("tiles=3", "tiles"))
    with pytest.raises(SpecError, match="tiles needed: -a tiles="):
        check_program(path, "flash")
    with pytest.raises(SpecError, match="no argument heads"):
        check_program(path, "flash", {"tiles": 2, "heads": 1})
    assert not check_program(path, "flash", {"tiles": 1}).faults


def test_buffers_at_common_bytes_are_one_memory(tmp_path: Path) -> None:
    body = """
        with T.Kernel(1, is_npu=True) as (cid, vid):
            a = T.alloc_ub([64], "float")
            b = T.alloc_ub([64], "float")
            T.annotate_address({{a: 0, b: {address}}})
            with T.Scope("V"):
                T.copy(A[0, :], a)
                T.tile.fill(b, 0.0)
"""
    for address, count in ((252, 1), (256, 0)):
        text = program(body.replace("{address}", str(address)).replace("{{", "{").replace("}}", "}"), ONE_CORE, {})
        report = check_program(written(tmp_path, text, f"at_{address}.py"), "kernel")
        assert len(report.faults) == count


def test_check_of_a_program_is_a_verb(tmp_path: Path) -> None:
    text, parameters, faulty, mended, _ = PUBLISHED["two readers, one flag"]
    bad = f"{written(tmp_path, program(text, parameters, faulty), 'bad.py')}::kernel"
    good = f"{written(tmp_path, program(text, parameters, mended), 'good.py')}::kernel"
    failed = CliRunner().invoke(app, ["check", bad])
    assert failed.exit_code == 1
    assert "race" in failed.stdout
    assert 'T.set_flag("MTE2", "V", 0)' in failed.stdout
    passed = CliRunner().invoke(app, ["check", good, "--json"])
    assert passed.exit_code == 0
    assert loads(passed.stdout)["passed"] is True
    for words, message in (
        ([good, "--update"], "--update"),
        ([good.partition("::")[0]], "name the program in the file"),
        ([str(tmp_path), "-a", "n=1"], "-a: "),
    ):
        refused = CliRunner().invoke(app, ["check", *words])
        assert refused.exit_code == 2
        assert message in refused.stderr


def test_two_core_groups_that_write_common_bytes_are_a_race(tmp_path: Path) -> None:
    body = """
        with T.Kernel(4, is_npu=True) as (cid, vid):
            a = T.alloc_ub([32, 64], "float16")
            with T.Scope("V"):
                T.tile.fill(a, 0.0)
                T.barrier_all()
                T.copy(a, D[(cid * STEP + vid) * 32 : (cid * STEP + vid + 1) * 32, :])
"""
    for step, count in ((1, 1), (2, 0)):
        text = program(body.replace("STEP", str(step)), ONE_CORE, {})
        faults = check_program(written(tmp_path, text, f"step_{step}.py"), "kernel").faults
        assert len(faults) == count
        assert all("of core group 1 writes D[32:64, 0:64]" in x.fault.text for x in faults)
