"""Random kernels with states that are factors: refused with a reason, or every bit is what their own lines compute."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from npusim import formats
from npusim import kernel as words
from npusim.config.tiling import build_tiling
from npusim.errors import FlagError, ProgramError, SpecError, TilingError
from npusim.kernels.declare.define import attention_fields, machine_of
from npusim.kernels.form.phase import Stacked, tensor_of
from npusim.program.ir.check import check
from npusim.program.numerics.executor import execute
from tests.algorithms.drawn_states import AXES, STILL, DrawnStates
from tests.algorithms.interpreter import Array, Machine, Numbers
from tests.algorithms.test_random_kernels import device_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from npusim.kernels.form.phase import Phase, WorkTile
    from npusim.program.ir.tile_program import TileProgram

MACHINES = ("ascend_910b2", "ascend_950", "h200", "a100", "a10", "v100", "t4")
#: A refusal is for a user: none of these words, which speak of how a machine is built.
INTERNAL = ("comes too early", "has still to")


class Lines:
    """One block: what the words of a kernel mean there, tile after tile."""

    def __init__(self, drawn: DrawnStates, cell: WorkTile, inputs: Mapping[str, Array], machine: Machine) -> None:
        self.drawn, self.cell, self.inputs = drawn, cell, inputs
        self.machine, self.order = machine, machine.row_sum
        self.spans = {axis: slice(at, at + n) for axis, at, n in cell.spans}
        self.operands = {n: self._numbers(np.zeros((1, 1)), tensor_of(drawn.tensor(n)).fmt) for n in drawn.operands}
        self.loops = self.index = 0

    def _numbers(self, of: Array, fmt: str) -> Numbers:
        return Numbers(formats.cast(of, fmt), fmt, self)  # type: ignore[arg-type]

    def _cut(self, n: str, axes: str) -> tuple[int, slice, slice]:
        """Return where a tile's, or the block's, part of a tensor is: matrix, rows, columns."""
        is_short = n in STILL or isinstance(self.drawn.tensor(n), Stacked)
        of_tile = slice(0, self.tile.stop - self.tile.start) if is_short else self.tile
        rows, cols = [self.spans.get(a, of_tile) if a else slice(0, 1) for a in (*axes.split(), "")[:2]]
        return (self.index if isinstance(self.drawn.tensor(n), Stacked) else 0), rows, cols

    def write(self, results: Mapping[str, Array]) -> None:
        """Write the block's part of every result, (matrices, rows, columns)."""
        space: dict[str, Any] = {w: getattr(self, w) for w in ("full", "tiles", "maximum")}
        space["kernel"] = lambda **_: lambda function: function
        exec(compile(self.drawn.source, "<kernel>", "exec"), space)
        made = space["drawn"](**self.operands)
        names, by_loop = list(results), dict[int, list[str]]()
        returned: Any = None
        while returned is None:
            try:
                left, loop = next(made), self.loops
            except StopIteration as end:
                left, loop, returned = end.value, 0, ()
            values = left if isinstance(left, tuple) else () if left is None else (left,)
            if loop not in by_loop:
                by_loop[loop], names = names[: len(values)], names[len(values) :]
            for n, x in zip(by_loop[loop], values, strict=True):
                assert x.fmt == tensor_of(self.drawn.tensor(n)).fmt
                results[n][self._cut(n, self.drawn.results[n])] = x.of
        assert not names

    def full(self, axes: str, start: float, fmt: str) -> Numbers:
        rows, cols = ((*(self.spans[a].stop - self.spans[a].start for a in axes.split()), 1))[:2]
        return self._numbers(np.full((rows, cols), start), fmt)

    def tiles(self, *operands: Numbers) -> Iterator[Any]:
        self.loops, self.index = self.loops + 1, 0
        names = {id(x): n for n, x in self.operands.items()}
        for run in self.cell.runs:
            for i in range(run.count):
                self.tile = slice(run.col + i * run.step, run.col + i * run.step + run.cols)
                now = {n: self.inputs[n][self._cut(n, AXES[n])] for n in self.operands}
                for n in STILL & now.keys():
                    self.operands[n].of = now[n]
                cut = tuple(Numbers(now[names[id(x)]], x.fmt, x.run, self.index) for x in operands)
                yield cut if len(cut) > 1 else cut[0]
                self.index += 1

    def maximum(self, a: Numbers, b: Any) -> Numbers:
        return a._with(formats.maximum, b)


def phase_of(drawn: DrawnStates, folder: Path) -> Phase:
    path, found = folder / f"states_{drawn.number}.py", dict(vars(words))
    path.write_text(drawn.source, encoding="utf-8")
    exec(compile(drawn.source, str(path), "exec"), found)
    operands: dict[str, Any] = {n: drawn.tensor(n) for n in drawn.operands}
    results = [drawn.tensor(n) for n in drawn.results]
    phase: Phase = found["drawn"].phase("drawn", drawn.blocks(), drawn.sizes, results, **operands)
    return phase


def program_of(phase: Phase, hw: str) -> TileProgram | str:
    """Return a device's program, checked, or why it is refused."""
    device = device_of(hw)
    machine, depth = machine_of(device), {"depth": "1"} if device.family == "ascend" else {}
    try:
        fields, _ = machine.fields_for(phase.name, phase, build_tiling(attention_fields(device.family), depth))
        program = machine.build("states", [(phase, fields)], 1)
        check(program, device.flags)
    except (FlagError, ProgramError, SpecError, TilingError) as refused:
        return str(refused)
    return program


def outcome(drawn: DrawnStates, phase: Phase, hw: str) -> str:
    """Return "same", where bits differ, or the reason of a refusal."""
    program = program_of(phase, hw)
    if isinstance(program, str):
        return program
    rng = np.random.default_rng(drawn.number)
    inputs: dict[str, Array] = {}
    for n in drawn.operands:
        t = tensor_of(drawn.tensor(n))
        inputs[n] = formats.cast(rng.normal(size=(t.heads, t.batch, t.rows, t.cols)), t.fmt)
    written = execute(program, lambda n, b, h: inputs[n][h, b]).tensors
    machine = Machine(device_of(hw))
    for head in range(drawn.heads):
        outs = {n: program.tensors[n] for n in drawn.results}
        here = {n: formats.cast(np.full((t.batch, t.rows, t.cols), np.nan), t.fmt) for n, t in outs.items()}
        for cell in phase.cells:
            if cell.head == head:
                Lines(drawn, cell, {n: x[head] for n, x in inputs.items()}, machine).write(here)
        for n, t in outs.items():
            there = np.array([written.head(t, b, head) for b in range(t.batch)])
            bits = np.dtype(f"u{there.itemsize}")
            is_nan = np.isnan(there.astype(np.float64)) & np.isnan(here[n].astype(np.float64))
            if (differ := (there.view(bits) != here[n].view(bits)) & ~is_nan).any():
                return f"differs: {n} of head {head}, {differ.sum()} of {differ.size}"
    return "same"


def check_all(numbers: range, folder: Path) -> Counter[str]:
    """Compare kernels on all machines; return how often each machine ran one."""
    ran: Counter[str] = Counter()
    for drawn in map(DrawnStates, numbers):
        phase = phase_of(drawn, folder)
        for hw in MACHINES:
            found = outcome(drawn, phase, hw)
            is_wrong = found.startswith("differs") or any(x in found for x in INTERNAL)
            assert not is_wrong, f"{drawn.number} on {hw}: {found}\n{drawn.source}"
            ran[hw] += found == "same"
    return ran


def test_bits_of_random_kernels_with_states_are_those_of_their_lines(tmp_path: Path) -> None:
    ran = check_all(range(6), tmp_path)
    assert ran["h200"] == 6
    assert ran["ascend_950"] >= 2


@pytest.mark.exhaustive
def test_bits_of_many_random_kernels_with_states_are_those_of_their_lines(tmp_path: Path) -> None:
    ran = check_all(range(200), tmp_path)
    assert ran["h200"] == 200
    assert min(ran[hw] for hw in MACHINES) >= 50


PLAIN = """\
F, fmt = "float32", "float16"
@kernel(results="o last", q="row key", k="token key", v="token value", walks="row token")
def drawn(q, k, v):
    s = full("key value", 0.5, F)
    for qj, kj, vj in tiles(q, k, v):
        h = s.to(fmt)
        yield (qj @ h).to(F).to(fmt)
        s = s + (kj.T @ vj).to(F)
    return s.to(fmt)
"""
LAST = "    return s.to(fmt)\n"
SECOND = "    for qj in tiles(q):\n        yield (qj @ s.to(fmt)).to(F).to(fmt)\n"
OUTSIDE = "    e = s.to(fmt)\n    for qj in tiles(q):\n        yield (qj @ e).to(F).to(fmt)\n"
#: A state with other rows than the block's: 64 of values, 32 of keys.
TURNED = (
    ('    s = full("key', '    z = full("value key", 1.0, F)\n    s = full("key'),
    ("        s = s +", "        z = z + (vj.T @ kj).to(F)\n        s = s +"), ("return s.to(fmt)", "return z"),
)  # fmt: skip


def changed(changes: tuple[tuple[str, str], ...], **results: str) -> DrawnStates:
    """Return a plain kernel with other lines, and with further results, by their axes."""
    drawn = DrawnStates(0)
    drawn.fmt, drawn.chunk, drawn.key, drawn.heads, drawn.value, drawn.width, drawn.tokens = (
        "float16", 32, 32, 2, 64, 64, 80,
    )  # fmt: skip
    drawn.operands, drawn.results, drawn.source = ["q", "k", "v"], {"o": "row value", **results}, PLAIN
    for old, new in changes:
        assert old in drawn.source
        drawn.source = drawn.source.replace(old, new)
    drawn.source = drawn.source.replace("o last", " ".join(drawn.results))
    return drawn


@pytest.mark.parametrize("hw", MACHINES)
def test_a_state_of_other_rows_than_the_blocks_starts_and_ends_whole(hw: str, tmp_path: Path) -> None:
    drawn = changed(TURNED, z="value key")
    assert outcome(drawn, phase_of(drawn, tmp_path), hw) == "same"


@pytest.mark.parametrize("hw", MACHINES)
def test_a_second_loop_takes_an_operand_again_or_is_refused(hw: str, tmp_path: Path) -> None:
    drawn = changed(((LAST, SECOND),), o2="row value")
    found = outcome(drawn, phase_of(drawn, tmp_path), hw)
    assert "are not in one loop" in found if hw.startswith("ascend") else found == "same"


def test_a_right_factor_made_outside_of_the_loop_is_refused(tmp_path: Path) -> None:
    drawn = changed(((LAST, OUTSIDE),), o2="row value")
    with pytest.raises(ProgramError, match=r"states_0.py:11: drawn: e \(key x value, float16\) is the right factor of"):
        phase_of(drawn, tmp_path)
