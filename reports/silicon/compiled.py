"""List what Triton makes of attention's tiles: registers, spills, shared memory, and spill accesses of the loop.

    python reports/silicon/compiled.py OUT_DIR [--kernels FILE] [--architectures sm_90,sm_86] [--seconds 540]
        [--part 0/2]

Writes OUT_DIR/ARCHITECTURE_registers.csv, rows as in hwconfigs.  Needs triton (3.6.0, which brings cuobjdump), but no
GPU: no kernel runs.  ``FILE`` holds the kernels, as for the given measurements.  Cases that have not begun after these
seconds are omitted and counted; the next call continues with them.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import itertools
import multiprocessing
import os
import re
import subprocess
import tempfile
import time
from functools import cache
from pathlib import Path

KERNELS = Path(__file__).parents[3] / "shared" / "measurements" / "h200_kernels.py"
FIELDS = (
    "schedule",
    "dtype",
    "head_dim",
    "causal",
    "block_q",
    "block_kv",
    "stages",
    "warps",
    "registers_per_thread",
    "spilled_registers",
    "shared_bytes",
    "loop_accesses",
)
INSTRUCTION = re.compile(
    r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)(?:\.[A-Z]+)*(?:\.(64|128)\b)?[^;]*?(0x[0-9a-f]+)?\s*;"
)
ROWS, KEYS, STAGES, WARPS = (16, 32, 64, 128, 256), (16, 32, 64, 128, 256), (1, 2, 3, 4), (4, 8)
#: Registers of a thread for the tiles of S and O alone, beyond which nobody wants a tile.
MOST_REGISTERS = 768
#: Formats of operands by kernel; FP8 products are there from sm_89 on.
FLOAT16, E4M3 = "float16", "float8_e4m3fn"
POINTERS = {FLOAT16: "*fp16", E4M3: "*fp8e4nv"}


def jobs(architecture: str) -> list[tuple[str, str, int, bool, int, int, int, int]]:
    """Return (schedule, dtype, head size, causal, rows, keys, stages, warps)."""
    listed = [
        *itertools.product(("flash",), (FLOAT16,), (64, 128, 256, 32), (False, True), ROWS, KEYS, STAGES, WARPS),
        *itertools.product(("split_kv",), (FLOAT16,), (64, 128, 256), (False,), (16, 32), KEYS, STAGES, WARPS),
        *itertools.product(("pasa",), (FLOAT16,), (64, 128), (False,), ROWS[2:4], KEYS[1:], STAGES, WARPS),
    ]
    if int(architecture.removeprefix("sm_")) > 86:
        fp8 = ("fp8_attention_chained", "fp8_attention_fresh")
        listed += itertools.product(fp8, (E4M3,), (64, 128), (False,), ROWS[2:4], KEYS[1:], STAGES, WARPS)
    return [
        j for j in listed if j[4] * (j[5] + j[2]) <= MOST_REGISTERS * 32 * j[7] and not (j[1] == E4M3 and j[5] < 32)
    ]


@cache
def kernels(path: str) -> object:
    """Return the module of the kernels alone: the file they stand in measures on a GPU."""
    blocks = re.findall(r"^@triton\.jit\n(?:.+\n)+", Path(path).read_text(), re.MULTILINE)
    alone = Path(tempfile.mkdtemp()) / "kernels_alone.py"
    alone.write_text("import triton, triton.language as tl\n" + "\n".join(blocks))
    spec = importlib.util.spec_from_file_location("kernels_alone", alone)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def source(path: str, job: tuple[str, str, int, bool, int, int, int, int]) -> object:
    """Return the kernel with the facts of a launch for the compiler: sizes that are 1, arguments that are multiples of
    16.
    """
    from triton.compiler import ASTSource

    name, dtype, d, causal, q, kv, stages, _ = job
    tile = {"D": d, "BM": q, "BN": kv, "ST": stages}
    scalars, constants, out = {"sc": "fp32", "S": "i32"}, tile, POINTERS[dtype]
    if name == "flash":
        fn, pointers, constants = "fa", "Q K V O", tile | {"CAUSAL": causal, "G": 1}
    elif name == "pasa":
        fn, pointers, constants, scalars = "pasa", "Q KP V O", tile | {"G": 1}, {"S": "i32", "inva": "fp32"}
    elif name == "split_kv":
        fn, pointers, constants, out = "split", "Q K V T L", tile | {"G": min(8, q)}, "*fp32"
        scalars["PER"] = "i32"
    else:
        fn, pointers, constants, out = "fp8", "Q K V O", tile | {"FRESH": name.endswith("fresh")}, "*fp32"
        scalars["ps"] = "fp32"
    kernel = getattr(kernels(path), fn)
    types = {p: POINTERS[dtype] if at < 3 else out for at, p in enumerate(pointers.split())}
    types |= scalars | dict.fromkeys(constants, "constexpr")
    aligned = {
        (at,): [["tt.divisibility", 16]]
        for at, n in enumerate(kernel.arg_names)
        if types[n].startswith("*") or types[n] == "i32"
    }
    return ASTSource(fn=kernel, signature={n: types[n] for n in kernel.arg_names}, constexprs=constants, attrs=aligned)


def compiled(job: tuple[str, str, float, tuple[str, str, int, bool, int, int, int, int]]) -> dict | str:
    """Compile one kernel; a word where the compiler refuses it, or the time is over."""
    path, architecture, end, tile = job
    if time.time() > end:
        return "left out"
    import triton
    from triton.backends.compiler import GPUTarget

    target = GPUTarget("cuda", int(architecture.removeprefix("sm_")), 32)
    try:
        made = triton.compile(source(path, tile), target=target, options={"num_warps": tile[7]})
    except Exception as error:  # noqa: BLE001 - more than the compiler takes
        return f"refused: {error!r}"[:120]
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage, sass = (
            subprocess.run([tools / "cuobjdump", option, file.name], check=True, capture_output=True, text=True).stdout
            for option in ("-res-usage", "--dump-sass")
        )
    registers, stack = (int(re.search(rf"{key}:(\d+)", usage)[1]) for key in ("REG", "STACK"))
    return dict(zip(FIELDS, (*tile, registers, stack // 4, made.metadata.shared, accesses(sass)), strict=True))


def accesses(sass: str) -> int:
    """Return registers loaded from local memory and stored there in the loop with most products."""
    lines = [(int(m[1], 16), m[2], int(m[3] or 32) // 32, m[4]) for m in INSTRUCTION.finditer(sass)]
    loops = [(int(to, 16), at) for at, name, _, to in lines if name == "BRA" and to and int(to, 16) < at]

    def count(loop: tuple[int, int], *names: str) -> int:
        return sum(width for at, name, width, _ in lines if loop[0] <= at <= loop[1] and name in names)

    best = max(loops, key=lambda p: count(p, "HMMA", "HGMMA", "QGMMA", "QMMA"), default=None)
    return 0 if best is None else count(best, "LDL", "STL")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--kernels", type=Path, default=KERNELS)
    parser.add_argument("--architectures", default="sm_90,sm_80,sm_86,sm_89,sm_120")
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--part", default="0/1", help="the first of every 2 tiles: 0/2")
    chosen = parser.parse_args()
    first, step = map(int, chosen.part.split("/"))
    end = time.time() + chosen.seconds
    chosen.out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("TRITON_CACHE_DIR", tempfile.mkdtemp())
    with multiprocessing.get_context("spawn").Pool() as pool:
        for architecture in chosen.architectures.split(","):
            tiles, file_name = jobs(architecture)[first::step], chosen.out / f"{architecture}_registers.csv"
            rows, words = list(csv.DictReader(file_name.open())) if file_name.exists() else [], {}
            there = {tuple(row.values())[:8] for row in rows}
            tiles = [t for t in tiles if tuple(map(str, t)) not in there]
            for row in pool.imap(compiled, [(str(chosen.kernels), architecture, end, t) for t in tiles]):
                if isinstance(row, dict):
                    rows.append(row)
                else:
                    words[row] = words.get(row, 0) + 1
            with file_name.open("w") as file:
                writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
                writer.writeheader()
                writer.writerows(rows)
            print(architecture, len(rows), "rows,", len(tiles), "tiles asked for,", words, flush=True)


if __name__ == "__main__":
    main()
