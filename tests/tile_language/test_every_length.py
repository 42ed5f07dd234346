"""Proofs for every length: executions in step against the order of flags, programs that fail late, reasons against."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from npusim.cli.app import app
from npusim.errors import SpecError
from npusim.kernels.tilelang.expert import Decisions, walk_program
from npusim.kernels.tilelang.program import Language, load_program
from npusim.studies.flags import check_every_length, check_program
from npusim.studies.flags.every_length import prove
from npusim.studies.flags.order import HappensBefore
from npusim.studies.flags.stepped_cores import SteppedCores
from tests.tile_language.flag_programs import BOTH, FLASH, ONE_CORE, PUBLISHED, program, removals, written
from tests.tile_language.interleavings import drawn

if TYPE_CHECKING:
    from pathlib import Path

    from npusim.studies.flags.order import Cores

#: A tile of A that is added to the one of the iteration before: a ring of two slots with flags for each slot.
RING = """
        with T.Kernel(1, is_npu=True) as (cid, vid):
            a = T.alloc_ub([2, 32, 64], "float16")
            b = T.alloc_ub([32, 64], "float16")
            with T.Scope("V"):
                T.set_flag("V", "MTE2", 0)
                T.set_flag("V", "MTE2", 1)
                for t in T.serial({count}):
                    s = t % 2
                    T.wait_flag("V", "MTE2", s)
                    T.copy(A[t * 32 : (t + 1) * 32, :], a[s, :, :])
                    T.set_flag("MTE2", "V", s)
                    {ready}
                    T.tile.add(b, b, a[s, :, :])
                    T.set_flag("V", "MTE2", s)
                    {after}
                T.wait_flag("V", "MTE2", 0)
                T.wait_flag("V", "MTE2", 1)
"""
WAIT = 'T.wait_flag("MTE2", "V", s)'


def ring(tmp_path: Path, ready: str = WAIT, after: str = "", count: str = "tiles") -> Path:
    text = RING.replace("{count}", count)
    return written(tmp_path, program(text, ONE_CORE, {"ready": ready, "after": after}))


def cores_of(path: Path, name: str) -> Cores:
    language = Language()
    kernel = load_program(path, name, {}, language)
    return walk_program(kernel, language, 0, Decisions(), {}).cores


def test_executions_in_step_have_the_faults_of_the_order_of_flags(tmp_path: Path) -> None:
    programs = [drawn(seed) for seed in range(300, 500)]
    whole = written(tmp_path, FLASH)
    programs.append(cores_of(whole, "flash"))  # type: ignore[arg-type]
    for line, _, text in removals(FLASH)[::3]:
        programs.append(cores_of(written(tmp_path, text, f"without_{line}.py"), "flash"))  # type: ignore[arg-type]
    faults = 0
    for cores in programs:
        found = HappensBefore(cores).complete()
        assert bool(SteppedCores(cores).fault) == bool(found), found
        faults += bool(found)
    assert 70 <= faults <= 190


@pytest.mark.parametrize("name", ["reused L1", "workspace of one slot", "two sets for one wait"])
def test_mended_programs_are_proved_and_longer_ones_have_no_fault(name: str, tmp_path: Path) -> None:
    text, parameters, faulty, mended, _ = PUBLISHED[name]
    good = written(tmp_path, program(text, parameters, mended), "good.py")
    report = check_every_length(good, "kernel", {"tiles": 1}, "tiles")
    assert report.proof is not None
    assert (report.faults, report.proof.reasons, report.proof.fault) == ((), (), None)
    assert not check_program(good, "kernel", {"tiles": 2 * report.proof.last + 1}).faults
    bad = written(tmp_path, program(text, parameters, faulty), "bad.py")
    report = check_every_length(bad, "kernel", {"tiles": 1}, "tiles")
    assert report.faults
    assert report.proof is None


def test_attention_on_both_cores_is_proved(tmp_path: Path) -> None:
    proof = prove(written(tmp_path, FLASH), "flash", {"tiles": 1}, "tiles", 1)
    assert (proof.reasons, proof.fault, proof.period) == ((), None, 1)
    assert proof.last > 16  # a flag between cores counts to 15


def test_states_repeat_with_the_slots(tmp_path: Path) -> None:
    proof = prove(ring(tmp_path), "kernel", {"tiles": 1}, "tiles", 1)
    assert (proof.reasons, proof.fault, proof.period) == ((), None, 2)


@pytest.mark.parametrize("late", [5, 23])
def test_a_fault_of_late_iterations_is_found_at_the_first_length_that_has_it(late: int, tmp_path: Path) -> None:
    conditional = f"if t != {late}:\n                        {WAIT}"
    path = ring(tmp_path, conditional)
    assert not check_program(path, "kernel", {"tiles": 4}).faults
    report = check_every_length(path, "kernel", {"tiles": 1}, "tiles")
    assert {x.fault.kind for x in report.faults} >= {"race"}
    assert report.bounds[0] == f"tiles = {late + 1}"


def test_a_fault_of_the_last_iteration_is_found(tmp_path: Path) -> None:
    path = ring(tmp_path, f"if t != tiles - 3:\n                        {WAIT}")
    assert not check_program(path, "kernel", {"tiles": 2}).faults
    report = check_every_length(path, "kernel", {"tiles": 1}, "tiles")
    assert report.bounds[0] == "tiles = 3"


@pytest.mark.parametrize(
    ("after", "count", "reason"),
    [
        ("if 2 * t < tiles:\n                        pass", "tiles", "from both ends of the loop is not fixed"),
        ("if t == 40:\n                        break", "tiles", "Break is code that a proof does not follow in a loop"),
        ("T.set_flag('V', 'MTE3', t)", "tiles", "a growing integer is used where npusim needs a number"),
        ("T.copy(A[0:32, :], a[t, :, :])", "tiles", "moves with an iteration"),
        ("if A[t, 0] > 0:\n                        pass", "tiles", "needs a value that is known only at run time"),
        ("", "2 * tiles", "each step of 1 adds 2 iterations to the loop, but a proof needs exactly one"),
        ("if t * t > 100:\n                        pass", "tiles", "a product of two integers that grow"),
        ("if t > 10**6:\n                        pass", "tiles", "instructions would run before states can repeat"),
        ("T.copy(b, A[tiles * 32 - 32 - t * 32 : tiles * 32 - t * 32, :])", "tiles", "nothing orders its access to A"),
    ],
)
def test_what_no_proof_covers_has_a_reason_with_its_line(after: str, count: str, reason: str, tmp_path: Path) -> None:
    proof = prove(ring(tmp_path, after=after, count=count), "kernel", {"tiles": 1}, "tiles", 1)
    assert proof.reasons or proof.fault
    assert reason in " ".join((*proof.reasons, proof.fault[1] if proof.fault else ""))


WAITS = f"\n                        {WAIT}"


@pytest.mark.parametrize(
    ("ready", "reason"),
    [
        (
            "if t == 0:\n                        c = 0\n                    c = c + 1\n                    if c != 100:"
            + WAITS,
            "c may have a value of an earlier iteration",
        ),
        (
            "if t == 0:\n                        start = t\n                    if t - start != 100:" + WAITS,
            "start may have a value of an earlier iteration",
        ),
        ("if t != 100.0:" + WAITS, "a comparison of an integer that grows with a float"),
        ("if isinstance(t, int):" + WAITS, "isinstance is a function that a proof does not follow"),
        ("if f'{t!r}' != '100':" + WAITS, "JoinedStr is code that a proof does not follow"),
        ("if b.writes != 100:" + WAITS, ".writes is code that a proof does not follow"),
        ("if type(tiles) is int:" + WAITS, "type is code that a proof does not follow"),
    ],
)
def test_a_loop_that_may_depend_on_earlier_iterations_is_not_proved(ready: str, reason: str, tmp_path: Path) -> None:
    proof = prove(ring(tmp_path, ready), "kernel", {"tiles": 1}, "tiles", 1)
    assert reason in " ".join(proof.reasons)


#: C is a tile behind V, whose last flag comes from another pipe than that of the copy where there are many tiles.
LATE = """
        with T.Kernel(1, is_npu=True) as (cid, vid):
            b = T.alloc_ub([16, 64], "float16")
            c = T.alloc_L1([32, 64], "float16")
            with T.Scope("V"):
                for t in T.serial(tiles):
                    if t > 2:
                        T.wait_cross_flag(2)
                    if t > 0:
                        T.set_cross_flag("MTE3", 1)
                    T.copy(b, D[t * 32 + vid * 16 : t * 32 + vid * 16 + 16, :])
                T.set_cross_flag("V" if tiles > 12 else "MTE3", 1)
                for i in T.serial(min(tiles, 3)):
                    T.wait_cross_flag(2)
            with T.Scope("C"):
                for t in T.serial(tiles):
                    T.wait_cross_flag(1)
                    T.copy(D[t * 32 : (t + 1) * 32, :], c)
                    T.set_cross_flag("MTE2", 2)
"""
#: C waits for a flag in its 25th iteration, up to which V is eight iterations ahead.
AHEAD = """
        with T.Kernel(1, is_npu=True) as (cid, vid):
            with T.Scope("V"):
                for t in T.serial(tiles):
                    if t >= 15:
                        T.wait_cross_flag(3)
                    if t >= 8:
                        T.set_cross_flag("MTE3", 2)
                for i in T.serial(min(tiles, 8)):
                    T.set_cross_flag("MTE3", 2)
                T.set_cross_flag("MTE3", 9)
                for i in T.serial(min(tiles, 15)):
                    T.wait_cross_flag(3)
            with T.Scope("C"):
                for t in T.serial(tiles):
                    if t == 24:
                        T.wait_cross_flag(9)
                    T.wait_cross_flag(2)
                    T.set_cross_flag("MTE2", 3)
                if tiles <= 24:
                    T.wait_cross_flag(9)
"""


@pytest.mark.parametrize(("text", "first_faulty"), [(LATE, 13), (AHEAD, 40)], ids=["late", "ahead"])
def test_a_core_that_is_behind_is_followed_to_its_own_iterations(text: str, first_faulty: int, tmp_path: Path) -> None:
    path = written(tmp_path, program(text, BOTH, {}))
    assert not check_program(path, "kernel", {"tiles": 12}).faults
    proof = prove(path, "kernel", {"tiles": 1}, "tiles", 1)
    assert proof.fault is not None
    assert proof.fault[0] == first_faulty
    assert check_program(path, "kernel", {"tiles": first_faulty}).faults


def drawn_ring(seed: int) -> str:
    """Return a program with one or two loops, slots, conditions at either end, and at times a flag left out."""
    rng = random.Random(seed)
    depth, ahead = rng.choice([1, 2, 3]), rng.choice([0, 0, 1])
    where = [
        "True",
        f"t != {rng.choice([0, 3, 11])}",
        f"t % {rng.choice([2, 3])} != 1",
        f"t < tiles - {rng.choice([1, 4])}",
    ]
    wait, free = (rng.choice(where) if rng.random() < 0.35 else "True" for _ in range(2))
    cross = rng.random() < 0.5
    lines = [
        "with T.Kernel(1, is_npu=True) as (cid, vid):",
        f'    a = T.alloc_ub([{depth}, 32, 64], "float16")',
        '    b = T.alloc_ub([32, 64], "float16")',
        '    c = T.alloc_L1([32, 64], "float16")',
        '    with T.Scope("V"):',
        *(f'        T.set_flag("V", "MTE2", {i})' for i in range(depth)),
        f"        for t in T.serial(tiles - {ahead}):" if ahead else "        for t in T.serial(tiles):",
        f"            s = t % {depth}",
        f"            if {free}:",
        '                T.wait_flag("V", "MTE2", s)',
        "            T.copy(A[t * 32 : (t + 1) * 32, :], a[s, :, :])",
        '            T.set_flag("MTE2", "V", s)',
        f"            if {wait}:",
        '                T.wait_flag("MTE2", "V", s)',
        "            T.tile.add(b, b, a[s, :, :])",
        '            T.set_flag("V", "MTE2", s)',
    ]
    if cross:
        lines += [
            f"            if t > {depth - 1}:",
            "                T.wait_cross_flag(1)",
            '            T.set_flag("V", "MTE3", 7)',
            '            T.wait_flag("V", "MTE3", 7)',
            f"            T.copy(b, W[t % {depth}, vid * 32 : vid * 32 + 32, :])",
            '            T.set_flag("MTE3", "V", 6)',
            '            T.wait_flag("MTE3", "V", 6)',
            '            T.set_cross_flag("MTE3", 0)',
        ]
    lines += [f'        T.wait_flag("V", "MTE2", {i})' for i in range(depth)]
    if cross:
        lines += [
            '    with T.Scope("C"):',
            f"        for t in T.serial(tiles - {ahead}):" if ahead else "        for t in T.serial(tiles):",
            "            T.wait_cross_flag(0)",
            f"            T.copy(W[t % {depth}, 0:32, :], c)",
            f"            if t < tiles - {depth + ahead}:",
            f'                T.set_cross_flag("{rng.choice(["MTE2", "MTE2", "MTE1"])}", 1)',
        ]
    body = "\n".join(f"        {line}" for line in lines)
    return program(f"\n{body}\n", BOTH, {})


@pytest.mark.parametrize("seeds", [range(6 * i, 6 * i + 6) for i in range(2)], ids=str)
def test_drawn_programs_have_no_fault_at_any_length_that_is_proved(seeds: range, tmp_path: Path) -> None:
    agreed(seeds, tmp_path)


def agreed(seeds: range, folder: Path) -> tuple[int, int, int]:
    """Return the numbers of programs that are proved, that have a fault, and that are neither; check each length."""
    counts = [0, 0, 0]
    for seed in seeds:
        path = written(folder, drawn_ring(seed), f"drawn_{seed}.py")
        proof = prove(path, "kernel", {"tiles": 4}, "tiles", 1)
        end = proof.last + 2 * proof.period + 3
        faulty = [n for n in (*range(4, 18), end, end + 1) if check_program(path, "kernel", {"tiles": n}).faults]
        if proof.fault:
            assert faulty, seed
            assert proof.fault[0] == min(faulty), seed
        elif not proof.reasons:
            assert not faulty, seed
        counts[1 if proof.fault else 2 if proof.reasons else 0] += 1
    return counts[0], counts[1], counts[2]


def test_loops_inside_may_use_one_name(tmp_path: Path) -> None:
    inner = "for i in T.serial(2):\n                        T.tile.mul(b, b, 1.0 + i)"
    outside = '                for i in T.serial(2):\n                    T.wait_flag("V", "MTE2", i)'
    text = RING.replace(
        '                T.wait_flag("V", "MTE2", 0)\n                T.wait_flag("V", "MTE2", 1)', outside
    )
    text = program(text.replace("{count}", "tiles"), ONE_CORE, {"ready": WAIT, "after": inner})
    proof = prove(written(tmp_path, text), "kernel", {"tiles": 1}, "tiles", 1)
    assert outside in text
    assert (proof.reasons, proof.fault) == ((), None)


def test_core_groups_may_have_other_numbers_of_tasks(tmp_path: Path) -> None:
    body = RING.replace("T.Kernel(1,", "T.Kernel(2,").replace("{count}", "tiles")
    at, end = body.index("                for t in"), body.index('                T.wait_flag("V", "MTE2", 0)')
    loop = "".join(f"    {line}\n" for line in body[at:end].splitlines())
    tasks = f"                for task in T.serial(T.ceildiv(3 - cid, 2)):\n{loop}"
    path = written(tmp_path, program(body[:at] + tasks + body[end:], ONE_CORE, {"ready": WAIT}))
    proof = prove(path, "kernel", {"tiles": 1}, "tiles", 1)
    assert (proof.reasons, proof.fault, proof.groups) == ((), None, (0, 1))
    faulty = written(tmp_path, program(body[:at] + tasks + body[end:], ONE_CORE, {}), "faulty.py")
    assert prove(faulty, "kernel", {"tiles": 1}, "tiles", 1).fault is not None


def test_a_quotient_of_the_length_grows_with_the_step(tmp_path: Path) -> None:
    path = ring(tmp_path, count="n // 64 - 1")
    proof = prove(path, "kernel", {"n": 128}, "n", 64)
    assert (proof.reasons, proof.first, proof.step) == ((), 128, 64)
    (reason,) = prove(path, "kernel", {"n": 128}, "n", 32).reasons
    assert "each step of 32 adds 1/2 iterations to the loop, but a proof needs exactly one; use --every n=64" in reason


def test_the_command_proves_or_says_why_not(tmp_path: Path) -> None:
    given = ["check", f"{ring(tmp_path)}::kernel", "-a", "tiles=1"]
    proved = CliRunner().invoke(app, [*given, "--every", "tiles"])
    assert proved.exit_code == 0
    assert "no faults within core group 0 for tiles = 1, 2, ...: lengths up to" in " ".join(proved.stdout.split())
    path = ring(tmp_path, count="2 * tiles")
    unproved = CliRunner().invoke(app, ["check", f"{path}::kernel", "-a", "tiles=1", "--every", "tiles"])
    assert unproved.exit_code == 1
    assert "not proved" in unproved.stdout
    for words, message in (
        ([*given[:2], "--every", "tiles"], "state the first length with -a tiles=INTEGER"),
        ([*given, "--every", "tiles=0"], "the step must be at least 1"),
        ([*given, "--every", "tiles=x"], "write NAME or NAME=STEP"),
        ([*given, "--every", "tiles", "--vector-barriers"], "--vector-barriers"),
        (["check", str(tmp_path), "--every", "tiles"], "--every"),
    ):
        refused = CliRunner().invoke(app, words)
        assert refused.exit_code == 2
        assert message in refused.stderr


def test_an_unknown_argument_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="there is no argument heads"):
        check_every_length(ring(tmp_path), "kernel", {"heads": 1}, "heads")


def test_an_operation_that_no_growing_integer_has_is_a_reason(tmp_path: Path) -> None:
    path = ring(tmp_path, after="if t ^ 1 == 7:\n                        pass")
    reasons = prove(path, "kernel", {"tiles": 1}, "tiles", 1).reasons
    assert any("unsupported operand type" in reason for reason in reasons)
