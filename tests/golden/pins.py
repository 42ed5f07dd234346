"""What every schedule does on every device, in figures that may not move unnoticed.

``python tests/golden/pins.py --issue NUMBER --reason TEXT`` computes them anew into ``pins.json`` and adds a line to
``pins_moved.csv``: which moved, for which issue, and why; read the difference before it is committed.  Changes for
several reasons are computed one after the other.  ``python tests/golden/pins.py --programs FOLDER`` writes every
program operation by operation: two such folders say with ``diff`` which operation a change moved.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from npusim.config.family import NODE_FAMILY
from npusim.config.load import load_device as read_device
from npusim.config.problem import CopyProblem, GemmProblem, KernelProblem, OperatorProblem, Problem, RowsProblem
from npusim.config.tiling import build_tiling
from npusim.errors import NpusimError
from npusim.library import SCHEDULES
from npusim.program.ir.tile import GlobalTile, RingTile, Tile
from npusim.program.ir.tile_program import Loop
from npusim.program.numerics.executor import execute
from npusim.program.numerics.input_tensors import recipe_source, with_followers
from npusim.run import run
from npusim.simulation.simulate import simulate_program
from npusim.studies.baseline.cycles import busy_cycles

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from npusim.config.device import DeviceSpec
    from npusim.program.ir.op import TileOp
    from npusim.program.ir.tile_program import Item, TileProgram

PINS = Path(__file__).with_name("pins.json")
#: Why pins moved: a line a change, the digest of ``pins.json`` after it.
MOVED = PINS.with_name("pins_moved.csv")
DEVICES = (
    "ascend_910b2",
    "ascend_910b1",
    "ascend_910b3",
    "ascend_910b4",
    "ascend_950",
    "ascend_950_28",
    "v100",
    "h200",
    "a10",
    "t4",
    "rtx_pro_6000",
    "rtx_5090",
    "gb10",
    "rtx_4090",
    "l4",
    "a6000",
    "h20",
    "h800",
    "gh200",
)
#: Devices that differ from the first of their family in speed and number of cores only.
SAME_BITS = ("ascend_910b1", "ascend_910b3", "ascend_910b4", "ascend_950_28")
#: GPUs whose files extend another chip's.
OF_OTHER_CHIPS = ("rtx_5090", "gb10", "rtx_4090", "l4", "a6000", "h20", "h800", "gh200")
#: Tiles whose scores fit in UB in ping-pong.
NARROW: dict[str, dict[str, object]] = {"ascend_950": {"block_q": 64, "block_kv": 256}}
#: Shapes of devices that share most with another, and what runs differently there.
FEWER: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(SAME_BITS, ("ragged", "causal", "long")),
    "ascend_950": ("ragged", "causal", "decode"),
    "ascend_950_28": ("causal",),
    "a10": ("causal", "bfloat16"),
    "t4": ("causal", "bfloat16"),
    "rtx_pro_6000": ("causal", "bfloat16"),
    **dict.fromkeys(OF_OTHER_CHIPS, ("causal",)),
}
APART = {
    "ascend_950": (
        "flash",
        "pasa",
        "fp8_attention",
        "split_kv",
        "retention",
        "gla",
        "gated_delta",
        "ssd",
        "flash_backward",
    ),
    "ascend_950_28": ("flash",),
    "a10": ("flash", "pasa", "retention", "gla", "gated_delta", "ssd", "flash_backward"),
    "t4": ("flash", "fp8_attention"),
    "rtx_pro_6000": ("flash", "pasa", "fp8_attention"),
    **dict.fromkeys(OF_OTHER_CHIPS, ("flash",)),
}
#: Shapes of schedules of plain tensors: tokens, heads and widths are those of Q and V.
OF_TENSORS = ("ragged", "grouped", "bfloat16")
NODES = ("ascend_910b2_x8", "h200_x2", "v100_x8")
SHAPES: dict[str, dict[str, Any]] = {
    "ragged": {"heads": 2, "seq_q": 197, "seq_kv": 333, "head_dim": 64, "value_head_dim": 80},
    "causal": {"heads": 2, "seq_q": 300, "seq_kv": 333, "head_dim": 64, "causal": True},
    "grouped": {"batch": 2, "heads": 4, "kv_heads": 2, "seq_q": 40, "seq_kv": 150, "head_dim": 32},
    "decode": {"heads": 4, "kv_heads": 1, "seq_q": 1, "seq_kv": 1027, "head_dim": 64},
    "bfloat16": {"heads": 1, "seq_q": 130, "seq_kv": 140, "head_dim": 64, "dtype": "bfloat16"},
    "long": {"heads": 1, "seq_q": 64, "seq_kv": 3000, "head_dim": 128},
}
#: Fields beside the defaults: small tiles on Ascend, so that few rows and keys make many.
SMALL: dict[str, dict[str, dict[str, object]]] = {
    "ragged": {
        "unified": {"block": 64},
        "volta_flash": {"warps": 8, "block_q": 256},
        "*": {"block_q": 64, "block_kv": 64},
    },
    "causal": {
        "unified": {"block": 64},
        "pasa": {"block_q": 64, "block_kv": 96, "scale_in": "queries"},
        "volta_flash": {"q": "shared", "stages": 2},
        "*": {"block_q": 160, "block_kv": 64},
    },
}
#: Further choices of a schedule that lead elsewhere in it, each on one shape.
EXTRA: tuple[tuple[str, str, str, str, dict[str, object]], ...] = (
    ("flash", "ascend_910b2", "causal", "", {"block_kv": 32, "depth": 0, "deal": "balanced"}),
    ("flash", "ascend_910b2", "long", "fa16", {"block_kv": 256, "depth": 3, "vector_rows": 7}),
    ("flash", "ascend_910b2", "causal", "", {"running": "gm", "vector_rows": 24}),
    ("flash", "ascend_910b2", "ragged", "", {"kernel": "pto"}),
    ("flash", "ascend_910b2", "causal", "", {"kernel": "pto"}),
    ("flash", "h200", "causal", "accumulate=fresh", {}),
    ("flash", "h200", "ragged", "", {"kernel": "cudnn"}),
    ("flash", "h200", "causal", "", {"kernel": "cudnn"}),
    ("flash", "h200", "ragged", "", {"kernel": "fa3"}),
    ("flash", "h200", "causal", "", {"kernel": "fa3"}),
    ("flash", "v100", "causal", "accumulate=fresh", {}),
    ("pasa", "ascend_910b2", "ragged", "fp32_mean", {"scale_in": "scores", "optimise": True}),
    ("pasa", "ascend_910b2", "causal", "fixed_reference", {"block_kv": 64}),
    ("pasa", "h200", "causal", "fixed_reference", {"block_kv": 64}),
    ("fp8_attention", "ascend_910b2", "causal", "fa3", {"block_kv": 64}),
    ("fp8_attention", "ascend_910b2", "ragged", "hpc_ops_s1", {"block_kv": 64}),
    ("fp8_attention", "h200", "causal", "flashinfer", {}),
    ("flash", "rtx_5090", "causal", "nvfp4", {}),
    ("flash", "rtx_5090", "causal", "mxfp8", {}),
    # Left to itself split_kv takes one split here, as a second kernel would take longer than it saves.
    ("split_kv", "ascend_910b2", "ragged", "", {"splits": 3}),
    ("split_kv", "ascend_910b2", "causal", "", {"splits": 6}),
    ("split_kv", "ascend_910b2", "decode", "", {"splits": 3}),
    ("split_kv", "ascend_950", "decode", "", {"splits": 5}),
    ("volta_flash", "v100", "causal", "acc_fp32", {}),
    ("volta_flash", "v100", "ragged", "acc_fp16,acc_qk=float32", {"arrangement": "2x2", "block_q": 64}),
    ("volta_flash", "v100", "long", "acc_fp32", {"launch": "longest_first", "residents": 1}),
)


@cache
def load_device(hw: str) -> DeviceSpec:
    return read_device(hw)


class Case:
    """One schedule on one device with one shape, choice of precision and fields."""

    def __init__(
        self, schedule: str, hw: str, shape: str, precision: str = "", fields: dict[str, object] | None = None
    ) -> None:
        self.schedule, self.hw, self.shape, self.precision = schedule, hw, shape, precision
        small = SMALL.get(shape, {})
        usual = small.get("*", NARROW.get(hw, {})) if hw.startswith("ascend") else {}
        self.fields = {**(small.get(schedule, usual) if hw != "h200" else {}), **(fields or {})}
        more = (*([precision] if precision else ()), *(f"{k}={v}" for k, v in (fields or {}).items()))
        self.name = " ".join((schedule, hw, shape, *more))

    def problem(self, hw: str) -> Any:
        """Return the shape as the schedule's kind of problem."""
        kind, sizes = SCHEDULES[self.schedule, load_device(hw).family].problem, SHAPES[self.shape]
        if kind is GemmProblem:
            fmt = sizes.get("dtype", "float16")
            return GemmProblem(m=sizes["seq_q"], n=sizes["seq_kv"], k=sizes["head_dim"] + 90, dtype=fmt)
        if kind is KernelProblem:
            key = sizes["head_dim"]
            own: dict[str, Any] = {"batch": sizes.get("batch", 1), "heads": sizes["heads"]}
            own |= {"tokens": sizes["seq_q"], "key": key, "value": sizes.get("value_head_dim", key)}
            return KernelProblem(**own, dtype=sizes.get("dtype", "float16"))
        if kind is CopyProblem:
            return CopyProblem(bytes=sizes["seq_q"] * sizes["seq_kv"] * 16)
        if kind is RowsProblem:
            what = {"causal": "rotary", "grouped": "gate", "decode": "gelu"}.get(self.shape, "norm")
            fmt = sizes.get("dtype", "float16")
            return RowsProblem(what=what, rows=sizes["seq_q"], cols=sizes["head_dim"], dtype=fmt)
        if kind is OperatorProblem:
            what = {"causal": "mean", "grouped": "join", "decode": "silu", "bfloat16": "widen"}.get(self.shape, "plus")
            return OperatorProblem(what=what, rows=sizes["seq_q"], cols=sizes["head_dim"])
        if self.schedule == "fp8_attention" and hw in ("h200", "ascend_950"):
            sizes = {**sizes, "dtype": "float32" if self.shape == "bfloat16" else "float8_e4m3fn"}
        return Problem(**sizes)

    def build(self) -> tuple[TileProgram, Any, Any]:
        """Return the program, the problem and the device."""
        device = load_device(self.hw)
        schedule = SCHEDULES[self.schedule, device.family]
        known = schedule.tiling.model_fields
        fields = build_tiling(schedule.tiling, {n: v for n, v in self.fields.items() if n in known})
        problem = self.problem(self.hw)
        return schedule.program(problem, fields, device, schedule.precision(self.precision)), problem, device

    def figures(self) -> dict[str, Any]:
        """Return cycles, busy cycles of every pipe, bytes of every link and a digest of the bits."""
        try:
            program, problem, device = self.build()
        except NpusimError as error:
            return {"refused": type(error).__name__}
        found: dict[str, Any] = {}
        if device.is_timed:
            timing = simulate_program(program, device, "block")
            found |= {"cycles": timing.cycles, "busy": busy_cycles(timing), "bytes": timing.link_bytes}
        if self.hw not in SAME_BITS and isinstance(problem, Problem | GemmProblem | RowsProblem | KernelProblem):
            found["bits"] = digest_of_bits(program, problem, SCHEDULES[self.schedule, device.family].follows)
        return found


def digest_of_bits(program: TileProgram, problem: Any, follows: Mapping[str, Any]) -> str:
    """Return a hash of everything the program leaves in its outputs; ``follows``: as in `Schedule`."""
    source = recipe_source(problem) if isinstance(problem, Problem) else drawn(program)
    source = with_followers(source, [*program.tensors.values()], {n: partial(f, problem) for n, f in follows.items()})
    done = execute(program, source)
    total = sha256()
    for tensor in program.tensors.values():
        if tensor.role == "output":
            for where, values in sorted(done.tensors.written(tensor).items()):
                total.update(repr(where).encode())
                total.update(np.ascontiguousarray(values).tobytes())
    return total.hexdigest()[:16]


def drawn(program: TileProgram) -> Any:
    """Return a source of normal values for tensors that no recipe knows."""

    def source(name: str, batch: int, head: int) -> Any:
        rng = np.random.default_rng([len(name), ord(name[0]), batch, head])
        tensor = program.tensors[name]
        return rng.normal(size=(tensor.rows, tensor.cols)).astype(np.float16)

    return source


def cases() -> Iterator[Case]:
    """Yield every schedule on every device with every shape, and the further choices."""
    for hw in DEVICES:
        family = load_device(hw).family
        for name, of in SCHEDULES:
            if of == family and name in APART.get(hw, (name,)):
                shapes = FEWER.get(hw, tuple(SHAPES))
                is_of_tensors = SCHEDULES[name, of].problem is KernelProblem
                yield from (Case(name, hw, x) for x in (OF_TENSORS if is_of_tensors else shapes) if x in shapes)
    for name, hw, shape, precision, fields in EXTRA:
        yield Case(name, hw, shape, precision, fields)


def node_figures() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the time of each node schedule on each node."""
    for hw in NODES:
        for name, family in SCHEDULES:
            if family == NODE_FAMILY:
                sizes: dict[str, Any] = {"seq": 300, "workload": "llama2_7b"}
                if name != "tiling_allreduce":
                    sizes = {"problem": CopyProblem(bytes=1 << 20)}
                if name == "layer" or name.startswith("offload"):
                    sizes = {"seq": 300, "workload": "llama2_7b", "phase": "decode"}
                if name == "gemm_allreduce":
                    sizes = {"problem": GemmProblem(m=512, n=512, k=256)}
                try:
                    result = run(name, hw=hw, trace_groups=(), numerics=False, **sizes)
                except NpusimError as error:
                    yield f"{name} {hw}", {"refused": type(error).__name__}
                    continue
                yield f"{name} {hw}", {"cycles": result.cycles}


# ---------------------------------------------------------------- operation by operation


def lines(program: TileProgram) -> Iterator[str]:
    """Yield rings, memories, tensors and every operation as text."""
    rings = {id(r): i for i, r in enumerate(program.rings)}
    for r in program.rings:
        ends = f"{r.producers} {r.consumers} {r.flag} {r.period}"
        yield f"ring {rings[id(r)]} {r.space}+{r.offset_bytes} {r.depth} x {r.slot_bytes} {ends} # {r.name}"
    yield f"used {sorted(program.used_bytes.items())}"
    yield f"queues {[q.name for q in program.queues]}"
    for name, tensor in sorted(program.tensors.items()):
        yield f"tensor {name} {tensor}"
    for phase in program.phases:
        yield f"phase {phase.name} {phase.serves} {phase.dealt}"
        for block in phase.blocks:
            yield f"block # {block}"
            yield from _items(phase.body(block), rings)
        for touch in phase.footprint(phase.blocks):
            yield f"touch {_operand(touch.region, rings)} {touch.times} {touch.read_bytes}"


def _items(items: Iterable[Item], rings: dict[int, int]) -> Iterator[str]:
    for item in items:
        if isinstance(item, Loop):
            if item.name:
                yield f"loop {len(item.indices)}"
            for index in item.indices:
                yield from _items(item.body(index), rings)
        else:
            yield _operation(item, rings)


def _operation(op: TileOp, rings: dict[int, int]) -> str:
    steps = "; ".join(
        f"{s.opcode.value} {_operand(s.dst, rings)} <- {', '.join(_operand(x, rings) for x in s.srcs)} {s.attributes}"
        for s in op.steps
    )
    held = ", ".join(_operand(h, rings) for h in op.handshake)
    return f"op {op.queue} {op.engine} [{steps}] [{held}] # {op.label}"


def _operand(o: Any, rings: dict[int, int]) -> str:
    match o:
        case RingTile():
            side = "fill" if o.is_producer else "front"
            held = f"{o.first:d}{o.last:d}"
            return f"{side} {rings[id(o.ring)]}+{o.offset_bytes} {o.rows}x{o.cols}/{o.stride} {o.fmt} {held}"
        case GlobalTile():
            return f"{o.tensor.name}[{o.batch},{o.head},{o.row}+{o.rows},{o.col}+{o.cols}]"
        case Tile():
            return f"{o.space}+{o.offset_bytes} {o.rows}x{o.cols}/{o.stride} {o.fmt}"
        case _:
            return repr(float(o))


def write_programs(folder: Path) -> None:
    """Write every program, one file a case."""
    folder.mkdir(parents=True, exist_ok=True)
    for case in cases():
        if case.hw in SAME_BITS:
            continue
        try:
            program, *_ = case.build()
        except NpusimError as error:
            text = f"refused: {error}\n"
        else:
            text = "\n".join([*lines(program), *(f"note {n}" for n in program.notes), ""])
        (folder / f"{case.name.replace(' ', '_').replace('/', '-')}.txt").write_text(text, encoding="utf-8")


def digest() -> str:
    """Return the digest of the pins as they are accepted."""
    return sha256(PINS.read_bytes()).hexdigest()[:16]


def moves() -> list[dict[str, str]]:
    """Return the changes of pins: issue, how many moved, schedules and devices, digest of all pins after it, reason."""
    with MOVED.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def accept(found: dict[str, Any], issue: int | None, reason: str) -> str:
    """Write pins that moved and why, or nothing where none did; return what was done."""
    accepted: dict[str, Any] = json.loads(PINS.read_text(encoding="utf-8"))
    moved = [name for name in {**accepted, **found} if accepted.get(name) != found.get(name)]
    if not moved:
        return "no pin moved"
    if issue is None or not reason.strip():
        raise SystemExit(f"{len(moved)} pins moved ({moved[0]}, ...): --issue NUMBER --reason TEXT say why")
    text = ",\n".join(f"{json.dumps(name)}: {json.dumps(figures)}" for name, figures in found.items())
    PINS.write_text(f"{{\n{text}\n}}\n", encoding="utf-8")
    pairs = dict.fromkeys(" ".join(name.split()[:2]) for name in moved)
    with MOVED.open("a", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerow([issue, len(moved), "; ".join(pairs), digest(), reason.strip()])
    return f"{len(moved)} pins moved"


def main() -> None:
    """Write the pins and why they moved, or with ``--programs FOLDER`` the programs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--programs", type=Path, metavar="FOLDER")
    parser.add_argument("--issue", type=int)
    parser.add_argument("--reason", default="")
    given = parser.parse_args()
    if given.programs:
        write_programs(given.programs)
        return
    found = {case.name: case.figures() for case in cases()} | dict(node_figures())
    sys.stdout.write(f"{accept(found, given.issue, given.reason)}\n")


if __name__ == "__main__":
    main()
