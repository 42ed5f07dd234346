"""One digest for everything that computes bits: the same on every machine and Python.

``python tests/formats/digests.py`` writes ``digests.json`` anew; do so only where bits are meant to
change, and look at what `git diff` says has changed.  Operands are made of raw random bits and
exact scaling, since normal deviates differ between mathematics libraries.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from npusim import formats as f
from npusim.config.load import load_device
from npusim.config.problem import Problem
from npusim.config.tiling import build_tiling
from npusim.errors import FormatError
from npusim.formats.cast import NAN_RULES, OVERFLOWS
from npusim.formats.elementwise import add, div, fma, maximum, minimum, mul, sub
from npusim.formats.reductions import ORDERS
from npusim.library import SCHEDULES
from npusim.machines.node.collective import ALGORITHMS, collective
from npusim.machines.node.reduction import execute
from npusim.program.numerics.evaluate import evaluate
from npusim.program.numerics.input_tensors import array_source

if TYPE_CHECKING:
    from collections.abc import Iterator

    from npusim.formats import FloatFormat
    from npusim.library import Schedule

FILE = Path(__file__).with_name("digests.json")
#: Formats of block elements; digests of casts between the others do not draw from them.
ELEMENTS = ("float6_e2m3fn", "float6_e3m2fn", "float4_e2m1fn", "float4_e1m2", "hifloat8")
OTHERS = [fmt for fmt in f.FORMATS.values() if fmt.name not in ELEMENTS]
FLOATS = [fmt for fmt in OTHERS if not fmt.is_integer]
COUNT = 3000


def random_bits(seed: str, count: int) -> Any:
    """The same 64-bit patterns everywhere: streams of a bit generator never change."""
    number = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "little")
    return np.random.PCG64(number).random_raw(count)


def any_pattern(fmt: FloatFormat, shape: tuple[int, ...], seed: str) -> Any:
    """Every kind of value, NaN, Inf and subnormals too."""
    bits = random_bits(seed, int(np.prod(shape))) >> np.uint64(64 - fmt.bits)
    return (bits << np.uint64(fmt.storage_shift)).astype(fmt.bits_dtype).view(fmt.dtype).reshape(shape)


def near_one(fmt: FloatFormat, shape: tuple[int, ...], seed: str) -> Any:
    """Values of either sign between 2**-8 and 4, rounded to the format."""
    bits = random_bits(seed, int(np.prod(shape))).view(np.int64)
    exact = (bits >> 20) * 2.0**-43 * 2.0 ** -(bits & 7)
    return f.cast(exact, fmt, overflow="saturate").reshape(shape)


def digest(*arrays: Any) -> str:
    state = hashlib.sha256()
    for array in arrays:
        state.update(np.ascontiguousarray(array).tobytes())
    return state.hexdigest()[:16]


def matrix_units() -> Iterator[tuple[str, str]]:
    for name, unit in f.ARITHMETICS.items():
        depth = 2 * unit.k if unit.k > 1 else 8
        found = []
        for make in (any_pattern, near_one):
            a, b = make(unit.a, (6, depth), name), make(unit.b, (depth, 40), name)
            c = make(unit.acc, (6, 40), name)
            if make is near_one:  # outliers that cancel
                top = 2.0 ** (unit.a.max_code.bit_length() - unit.a.mantissa_bits + 1)
                a[:2, 0], a[:2, depth // 2] = f.cast([top, -top], unit.a, overflow="saturate")
                b[depth // 2] = b[0]
            found += 2 * [f.matmul(a, b, c, arithmetic=unit)]
        yield f"matmul {name}", digest(*found)


def casts() -> Iterator[tuple[str, str]]:
    for target, rounding in itertools.product(f.FORMATS.values(), f.ROUNDINGS):
        found = []
        for overflow, nan in itertools.product(OVERFLOWS, NAN_RULES):
            for source in OTHERS:
                x = any_pattern(source, (COUNT // 8,), source.name)
                near = near_one(source, (COUNT // 8,), source.name)
                rules = {"rounding": rounding, "overflow": overflow, "nan": nan}
                try:
                    found += [f.cast(v, target, **rules) for v in (x, near)]
                except FormatError:  # a rule that the target cannot express
                    continue
        yield f"cast {target.name} {rounding}", digest(*found)


def functions() -> Iterator[tuple[str, str]]:
    for name, variants in f.VARIANTS.items():
        for variant, chosen in variants.items():
            for fmt in map(f.get_format, chosen.formats):
                count = 1 << fmt.bits if fmt.bits <= 8 else COUNT
                x = any_pattern(fmt, (count,), name), near_one(fmt, (count,), name)
                call = getattr(f, name)
                yield f"{name}.{variant} {fmt.name}", digest(*(call(v, fmt, variant=variant) for v in x))


def elements() -> Iterator[tuple[str, str]]:
    for operation in (add, sub, mul, div, fma, maximum, minimum):
        operands = [p for p in inspect.signature(operation).parameters if p in "xyz"]
        for fmt in FLOATS:
            found = []
            for make in (any_pattern, near_one):
                x = [make(fmt, (COUNT,), f"{operation.__name__} {p}") for p in operands]
                found.append(operation(*x, fmt))
                if operation in (maximum, minimum):
                    found.append(operation(*x, fmt, nan="propagate"))
            yield f"{operation.__name__} {fmt.name}", digest(*found)


def sums() -> Iterator[tuple[str, str]]:
    for fmt in FLOATS:
        x = [make(fmt, (9, n), "sums") for make in (any_pattern, near_one) for n in (1, 33, 128)]
        for order in ORDERS:
            yield f"sum {order} {fmt.name}", digest(*(f.reduce_sum(v, fmt, order) for v in x))
        yield f"max {fmt.name}", digest(*(f.reduce_max(v, fmt) for v in x))


def schedules() -> Iterator[tuple[str, str]]:
    devices = {"ascend": "ascend_910b2", "nvidia": "h200"}
    for (name, family), schedule in SCHEDULES.items():
        if schedule.problem is not Problem or family not in devices:
            continue
        for preset in schedule.presets(load_device(schedule.hw or devices[family])):
            yield f"{name} {family} {preset}", digest(attend(schedule, preset, devices[family]))


def attend(schedule: Schedule, preset: str, hw: str) -> Any:
    """Two heads that share keys, ragged tiles, of which the last is masked in part."""
    is_fp8 = schedule.name == "fp8_attention" and schedule.family == "nvidia"
    fmt = f.get_format("float8_e4m3fn" if is_fp8 else "float64" if preset == "float64" else "float16")
    problem = Problem(heads=2, kv_heads=1, seq_q=24, seq_kv=140, head_dim=32, causal=True, dtype=fmt.name)
    shape = {"q": (1, 2, 24, 32), "k": (1, 1, 140, 32), "v": (1, 1, 140, 32)}
    tensors = {n: near_one(fmt, shape[n], n) for n in shape}
    device = load_device(schedule.hw or hw)
    fields = () if schedule.hw else ("block", "block_q", "block_kv")  # volta_flash: what fits
    blocks = {n: 64 for n in fields if n in schedule.tiling.model_fields}
    program = schedule.program(problem, build_tiling(schedule.tiling, blocks), device, schedule.precision(preset))
    return evaluate(program, problem, array_source(tensors), rows="all", heads="all").output


def collectives() -> Iterator[tuple[str, str]]:
    inputs = [near_one(f.get_format("float16"), (41,), str(rank)) for rank in range(4)]
    for algorithm in sorted(ALGORITHMS):
        sums = execute(collective("allreduce", algorithm, 4), inputs, "float16")
        yield f"allreduce {algorithm}", digest(*sums)


PARTS = (matrix_units, casts, functions, elements, sums, schedules, collectives)


def all_digests() -> dict[str, str]:
    return dict(sorted(item for part in PARTS for item in part()))


if __name__ == "__main__":
    found = all_digests()
    FILE.write_text(json.dumps(found, indent=0) + "\n")
    sys.stdout.write(f"{FILE}: {len(found)} digests\n")
