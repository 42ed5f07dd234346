"""Wrong commands of every kind: each is said on stderr in a line that names what is wrong, none is a traceback.

Run in this process, so that they take seconds together; what the files are wrong in stands in ``odd_files``.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

import pytest
from typer.main import get_group
from typer.testing import CliRunner

from npusim.cli.app import app
from tests.cli.odd_files import write_odd_files

if TYPE_CHECKING:
    from pathlib import Path

#: A command, and the beginning of its message, after ``npusim: error:``.
WRONG = (
    ("rnu", "No such command 'rnu'. Did you mean 'run'?"),
    # -------------------- run
    ("run", "which schedule? For example: npusim run flash"),
    ("evaluate", "which schedule? For example: npusim evaluate flash"),
    ("evaluate flash --with nofile.py:kernel", "nofile.py: no such file; a candidate is FILE.py:NAME"),
    ("serve --http nope", "Invalid value for '--http'"),
    ("run gemm --hw h200", "schedule gemm needs a matrix product: --problem m=4096,n=4096,k=4096"),
    ("run flsh", "unknown schedule 'flsh'. Did you mean `flash`? Allowed: allreduce,"),
    ("run Flash", "unknown schedule 'Flash'. Did you mean `flash`? Allowed: allreduce,"),
    ("run flash pasa", "Got unexpected extra argument(s) (pasa)"),
    ("run flash --sqe 1", "No such option: --sqe (Possible options: --seed,"),
    (
        "run gla --seq 8k",
        "--problem batch=..,heads=..,tokens=..,key=..,value=.. already states the sizes; remove these",
    ),
    ("run flash --seq", "Option '--seq' requires an argument."),
    ("run flash --seq 0", "--seq 0: write a positive whole number: 4096, 8k"),
    ("run flash --seq -4", "--seq -4: write a positive whole number: 4096, 8k"),
    ("run flash --seq 1e3", "--seq 1e3: write a positive whole number: 4096,"),
    ("run flash --seq 4096.5", "--seq 4096.5: write a positive whole number:"),
    ("run flash --seq 8q", "--seq 8q: write a positive whole number: 4096, 8k"),
    ("run flash --seq 99999999999999999999", "seq_q: 99999999999999999999 must be at most"),
    ("run flash --seq-q 512 --seq-kv 256", "seq_q: 512 causal queries but only 256 keys: the"),
    ("run flash --batch 0", "--batch 0: write a positive whole number: 4096,"),
    ("run flash --batch many", "--batch many: write a positive whole number:"),
    ("run flash --batch 9007199254740992", "more than 10 min; to"),
    ("run flash --tp 0", "--tp 0: write a positive whole number: 4096, 8k"),
    ("run flash --tp 7", "tensor_parallel: 7 does not divide 40 query"),
    (
        "run flash --dtype fp16",
        "Invalid value for '--dtype': 'fp16' is not one of 'float16', 'bfloat16', 'float8_e4m3fn', 'float8_e5m2', "
        "'float32'. Did you mean `float16`?",
    ),
    (
        "run flash --dtype xyz",
        "Invalid value for '--dtype': 'xyz' is not one of 'float16', 'bfloat16', 'float8_e4m3fn'",
    ),
    ("run flash --dtype int8", "Invalid value for '--dtype'"),
    ("run flash --dtype float64", "Invalid value for '--dtype'"),
    ("run flash --dtype bfloat16 --precision fa16", "P V: float16 by bfloat16, but"),
    ("run flash --dtype float32", "no arithmetic is stated for float32: the matrix"),
    ("run flash -w", "Option '-w' requires an argument."),
    ("run flash -w pangu", "no workload named 'pangu'. Did you mean"),
    ("run flash -w none.yaml", "none.yaml: no such workload file"),
    ("run flash -w empty.yaml", "empty.yaml:1  the file is empty"),
    ("run flash -w list.yaml", "list.yaml:1  the file is not a mapping of keys to"),
    ("run flash -w twice.yaml", "twice.yaml:2  name: duplicate key; first given in"),
    ("run flash -w unknown_key.yaml", "unknown_key.yaml:9  head: unknown key. Did you"),
    ("run flash -w device.yaml", "device.yaml:1  schema: 'npusim.device/1' is"),
    ("run flash -w evil_name.yaml", "evil_name.yaml:2  name: '../../x' has '/'; a name"),
    ("run flash -w binary.yaml", "binary.yaml: cannot be read: not UTF-8 text"),
    ("run flash -w heads.yaml", "heads.yaml:9  kv_heads: 3 does not divide 2 query"),
    ("run flash -w folder.yaml", "folder.yaml: this is a folder, not a workload file"),
    ("run flash --hw folder.yaml", "folder.yaml: this is a folder, not a device or node file"),
    ("run folder.npz::0", "folder.npz: this is a folder, not a file; `npusim record script.py` writes one"),
    ("run folder.py:mine", "folder.py: this is a folder, not a file; a schedule of your own is FILE.py:NAME"),
    ("record folder.py", "folder.py: this is a folder, not a file; a program is script.py"),
    ("evaluate flash --with folder.py:mine", "folder.py: this is a folder, not a file; a candidate is FILE.py:NAME"),
    ("diff folder.npz flash", "folder.npz: this is a folder, not a file; it must be an .npz or .safetensors"),
    ("run flash -w tabs.yaml", "tabs.yaml:2  not valid YAML: while scanning for"),
    ("run flash -w tag.yaml", "tag.yaml:1  a: tag !python/none is not supported"),
    ("run flash -w anchors.yaml", "anchors.yaml:1  not valid YAML: found undefined"),
    ("run flash --hw ascend_910b", "no device or node named 'ascend_910b'. Did you"),
    ("run flash --hw 910B", "no device or node named '910B'. Did you mean `ascend_910b1`?"),
    ("run flash --hw 910b3", "no device or node named '910b3'. Did you mean `ascend_910b3`?"),
    ("run flash --hw A100", "no device or node named 'A100'. Did you mean `a100`?"),
    ("run flash --hw h20x", "no device or node named 'h20x'. Did you mean `h20`?"),
    ("run flash --seq 64 --heads 8", "q_heads and kv_heads (--q-heads, --kv-heads) state the heads of the problem"),
    ("run flash --shape B4/2", "shape B4/2: 'B4/2' is not a size; write B4,N32/8"),
    ("run flash --hw tpu", "no device or node named 'tpu'; allowed:"),
    ("run flash --hw none.yaml", "none.yaml: no such device or node file"),
    ("run flash --hw empty.yaml", "empty.yaml:1  the file is empty"),
    ("run flash --hw binary.yaml", "binary.yaml: cannot be read: not UTF-8 text"),
    ("run flash --hw w.yaml", "w.yaml:1  schema: 'npusim.workload/1' is another"),
    ("run flash --hw loop.yaml", "loop.yaml:1  extends: files extend each other in"),
    ("run flash --hw ascend_910b2_x8", "schedule 'flash' has no mapping for node cores;"),
    ("run volta_flash --hw ascend_910b2", "schedule 'volta_flash' has no mapping for ascend"),
    ("run volta_flash --hw h200 --no-numerics", "volta_flash: h200 has no m8n8k4; use"),
    ("run fp8_attention --hw a10", "fp8_attention: a10 has neither an FP8 matrix unit nor one"),
    ("run flash --hw t4 --dtype bfloat16", "no arithmetic is stated for bfloat16: the"),
    ("run flash --hw t4 -t stages=2", "stages: 2 tiles in flight need asynchronous copies,"),
    ("run tiling_allreduce --hw h200", "schedule 'tiling_allreduce' has no mapping for"),
    ("run two_level --hw h200", "schedule 'two_level' has no mapping for nvidia"),
    ("run flash -C", "Option '-C' requires an argument."),
    ("run flash -C clock_hz", "-C clock_hz: write -C key=value"),
    ("run flash -C clock_hz=", "-C clock_hz=: write -C key=value"),
    ("run flash -C =3", "-C =3: write -C key=value"),
    ("run flash -C clock=1", "-C clock=1: there is no key 'clock'. Did you mean"),
    ("run flash -C clock_hz=abc", "-C clock_hz=abc: expected a number, got 'abc'"),
    ("run flash -C clock_hz=0", "-C clock_hz=0: must be greater than 0"),
    ("run flash -C clock_hz=-1", "-C clock_hz=-1: must be finite and not negative"),
    ("run flash -C clock_hz=nan", "-C clock_hz=nan: expected a number, got 'nan'"),
    ("run flash -C clock_hz=inf", "-C clock_hz=inf: expected a number, got 'inf'"),
    ("run flash -C clock_hz=1e-300", "-C clock_hz=1e-300: 1e-300 must be between 1e+06"),
    ("run flash -C clock_hz=1e300", "-C clock_hz=1e300: 1e+300 must be between 1e+06"),
    ("run flash -C links=3", "-C links=3: not a single value; its keys:"),
    ("run flash -C links.hbm.bytes_per_s=1e-300", "-C links.hbm.bytes_per_s=1e-300: 1e-300 must be"),
    ("run flash -C links.hbm.bytes_per_s=1", "-C links.hbm.bytes_per_s=1: 1 is too small: at"),
    ("run flash -C links.ddr.bytes_per_s=1e12", "-C links.ddr.bytes_per_s=1e12: there is no key 'ddr' in"),
    ("run flash -C group_count=1.5", "-C group_count=1.5: expected a whole number, got"),
    ("run flash -C group_count=0", "-C group_count=0: must be greater than 0"),
    ("run flash -C group_count=1000000", "-C group_count=1000000: 1000000 must be between"),
    ("run flash -C cores.aic.engines.CUBE.queue_depth_count=1000000", "-C"),
    ("run flash -C flags.cross_core_latency_cycles=1000000000000000000", "-C"),
    ("run flash -C clock_hz.value=3", "-C clock_hz.value=3: clock_hz has no keys below it"),
    ("run flash -C name=../x", "-C name=../x: '../x' has '/'; a name is part of"),
    ("run flash -C family=risc", "-C family=risc: 'risc' is not one of: 'ascend' or"),
    ("run flash -C memory.l2.capacity_bytes=3parsec", "-C memory.l2.capacity_bytes=3parsec: expected a"),
    ("run flash -t", "Option '-t' requires an argument."),
    ("run flash -t block_q", "-t block_q: write -t key=value"),
    ("run flash -t =3", "-t =3: write -t key=value"),
    ("run flash -t blok=1", "blok: unknown tiling field. Did you mean"),
    ("run flash -t block_kv=0", "block_kv: '0' must be at least 16"),
    ("run flash -t block_kv=-16", "block_kv: '-16' must be at least 16"),
    ("run flash -t block_kv=100", "block_kv: '100' must be a multiple of 16;"),
    ("run flash -t block_kv=x", "block_kv: expected a whole number, got 'x'"),
    ("run flash -t block_kv=1e9", "block_kv: expected a whole number, got '1e9'"),
    (
        "run flash -t block_q=512 -t block_kv=512 -t vector_rows=16",
        "largest values that fit, each with the other fields unchanged: ",
    ),
    ("run flash -t depth=99", "depth: '99' must be at most 14"),
    ("run flash -t deal=poker", "deal: 'poker' is not one of: 'round_robin', 'balanced' or"),
    ("run flash -t vector_rows=0", "vector_rows: '0' must be at least 1"),
    ("run flash -t block_q=nan", "block_q: expected a whole number, got 'nan'"),
    ("run pasa -t beta=1", "beta: 1.0 must be below 1 (at 1"),
    ("run pasa -t beta=nan", "beta: expected a finite number, got 'nan'"),
    ("run pasa -t scale_in=nowhere", "scale_in: 'nowhere' is not one of: 'matrix',"),
    ("run flash --precision x", "precision 'x': not a preset of flash; allowed:"),
    ("run flash --hw xeon_avx512 --precision mxfp4", "packaged devices that multiply it: ascend_950, ascend_950_28"),
    ("run flash --hw ascend_950 --precision nvfp4", "not a preset of flash on these cores; packaged devices that"),
    ("run flash --precision fa16,fa16_32", "precision fa16, fa16_32: name at most one preset, then use"),
    ("run flash --precision scores=float17", "unknown number format 'float17'; near names:"),
    (
        "run flash --precision scors=float16",
        "precision field 'scors': fa2_fp32 has no field of that name. Did you mean `scores`? Allowed: scores,",
    ),
    ("run flash --precision fa16,scores=float16,scores=float32", "precision field 'scores' is given twice: float16"),
    ("run flash --precision exp_variant=magic", "precision field exp_variant: 'magic' is not one"),
    ("run flash --precision accumulate=chained", "accumulate=chained: PV adds to O"),
    ("run flash --precision accumulate=never", "precision field accumulate: 'never' is not one of"),
    ("format nope", "int8, int8_128, mxfp4, mxfp6_e2m3, mxfp6_e3m2, mxfp8, mxfp8_e5m2, mxint8, nvfp4, tf32"),
    ("run flash --arithmetic none", "unknown arithmetic 'none'; known names: ieee.f64,"),
    ("run flash --arithmetic hopper.wgmma.k32.e4m3.f32", "Q K^T: float16 by float16, but"),
    ("run flash --method", "Option '--method' requires an argument."),
    ("run flash --method x", "method 'x'; allowed: auto, des, block,"),
    ("run flash --rows x", "rows x: write sample, all, or numbers such as"),
    ("run flash --rows 5-1", "rows 5-1: 5-1: the last"),
    ("run flash --rows 99999999", "rows: there is no 99999999; choose from 0 to 4095"),
    ("run flash --rows ,", "rows ,: write sample, all, or numbers such as"),
    ("run flash --heads 3-1", "heads 3-1: 3-1: the last"),
    ("run flash --heads 99", "heads: there is no 99; choose from 0 to 4"),
    ("run flash --heads -1", "heads -1: write sample, all, or numbers such as"),
    ("run flash --seed -1", "seed: -1 must be at least 0"),
    ("run flash --seed x", "Invalid value for '--seed'"),
    ("run flash -w pasa_resonance --seed -3", "seed: -3 must be at least 0"),
    ("run flash --trace-groups all", "trace_groups all: write last, or numbers such as"),
    ("run flash --trace-groups 99-", "trace_groups 99-: write last, or numbers such as"),
    ("run flash --tensors none.npz", "none.npz: no such file, and no packaged tensors"),
    ("run flash --tensors w.yaml", "w.yaml: not a readable tensor file, or truncated:"),
    ("run flash --tensors short.npz", "short.npz: not a readable tensor file, or"),
    ("run flash --tensors shape.npz", "shape.npz: q (1, 1, 64, 16), k (1, 1, 63, 16), v"),
    ("run flash --tensors huge.npz", "huge.npz: q should have 32 GiB, but the file has at most 128"),
    ("run flash --tensors pickle.npz", "pickle.npz: holds pickled objects, which are"),
    ("run flash --tensors int.npz", "int.npz: q is int32; must be float16 or bfloat16 or"),
    ("run flash --tensors nan.npz", "nan.npz: v has 1024 NaN, the first at (0, 0, 0, 0), which a query sees"),
    ("run flash --tensors f32.npz", "no arithmetic is stated for float32: the matrix"),
    ("run flash --tensors short.safetensors", "short.safetensors: not a readable tensor file, or"),
    ("run flash --tensors keys.npz", "keys.npz: needs keys q, k, v (or query, key, value) or one <prefix>.q, .k, .v;"),
    ("run flash --tensors ok.npz --seq 64", "seq: the tensors already have the sizes; remove"),
    ("run flash --tensors ok.npz --tensor-prefix other", "ok.npz: no key 'other.q'; it has k, q, v"),
    ("run flash --tensors ok.npz --layout nchw", "Invalid value for '--layout'"),
    ("run flash --tensors ok.npz --layout bsh", "ok.npz: q has shape (1, 1, 64, 16); layout bsh"),
    ("run flash --tensors ok.npz --layout tnd", "ok.npz: q has shape (1, 1, 64, 16); layout tnd"),
    ("run flash --problem m=1,n=1,k=1", "schedule flash needs sizes of attention: use -w,"),
    ("run gemm", "schedule gemm needs a matrix product: --problem"),
    ("run gemm --problem m=1", "--problem m=1: write m=..,n=..,k=.. (and"),
    ("run gemm --problem m=1,n=0,k=1", "--problem m=1,n=0,k=1: n must be a positive whole"),
    ("run gemm --problem m=1,n=1,k=1,dtype=int4", "--problem m=1,n=1,k=1,dtype=int4: write"),
    ("run gemm --problem m=4x,n=1,k=1", "--problem m=4x,n=1,k=1: m must be a positive"),
    ("run gemm --problem bytes=4", "schedule gemm needs a matrix product: --problem"),
    ("run copy --problem bytes=1MiBs", "--problem bytes=1MiBs: bytes must be a positive"),
    ("run copy --problem m=1,n=1,k=1", "schedule copy needs a number of bytes: --problem"),
    ("run flash --ignore nothing", "ignore nothing; allowed: window, chunk, softcap, alibi,"),
    ("run flash --seq 64k --rows all", "more than 10 min; to"),
    ("run flash --seq 1M --method des --no-numerics", "more than 10 min; to"),
    ("run flash --seq 1000000000000 --no-numerics", "more than 10 min; to"),
    ("run flash --out file/a", "file/a: cannot be written: file is not a folder"),
    ("run flash --out file", "file: is a file, not a folder; choose another folder with --out"),
    ("run flash --out mine", "mine: contains 'thesis.tex', which is not a file of a"),
    ("run flash --fields --hw tpu", "no device or node named 'tpu'; allowed:"),
    ("run flsh --fields", "unknown schedule 'flsh'. Did you mean `flash`? Allowed: allreduce,"),
    ("run flash --rows 0-300000000", "rows: there is no 300000000; choose from 0 to 4095"),
    ("run flash --precision=", "--precision: the value is empty; write one, or remove the option"),
    ("run flash --arithmetic ''", "--arithmetic: the value is empty; write one, or remove the option"),
    ("run flash --ignore ,", "--ignore ,: a name is empty"),
    ("run flash -w '~nosuchuser/x.yaml'", "~nosuchuser/x.yaml: no such workload file"),
    ("run flash -w hex.yaml", "hex.yaml:7  seq: '0xffff"),
    ("run flash --tensors none_of_it.npz", "none_of_it.npz: q has shape (1, 0, 64, 16), which is empty"),
    ("run flash --tensors bf16.npz", "q is |V2: .npz stores the bits of bfloat16 and float8_e4m3fn, but not the"),
    ("run flash --tensors e4m3.npz", "q is |V1: .npz stores the bits of bfloat16 and float8_e4m3fn, but not the"),
    ("run flash --tensors ok.npz -w w.yaml", "tensors: 1 query heads of 16 and 1 of keys do not match workload w"),
    (
        "run flash --no-save -o a --no-trace --timeline 0:1",
        "--out, --trace, --timeline: --no-save writes nothing; remove it,",
    ),
    ("run flash --no-trace --trace-groups 0,1", "--trace-groups: --no-trace writes no timeline"),
    ("run flash --no-numerics --save-output", "--save-output: these options have an effect"),
    ("run gemm --problem m=64,n=64,k=64 --save-output", "--save-output: these options have an effect"),
    ("run flash --hw xeon_avx512 --sensitivity", "--sensitivity: these options are for devices with a timing model"),
    ("run flash --fields --seq 64 -o a", "seq, --out: --fields only lists"),
    ("run flash --window ٥,٥", "--window ٥,٥: write keys of a window, 512, or"),
    ("run flash --softcap ٥", "--softcap ٥: write a positive number, such as 50"),
    ("run flash --timeline ٠:٥", "--timeline ٠:٥: write from and to in us"),
    ("run fp8_attention --precision scale=٢", "precision field scale: '٢' is not a number"),
    ("run flash --kind local", "kind: pangu_38b has no local layers; allowed: global"),
    ("run flash --precision=,", "precision ',': a part is empty; write a preset, then"),
    ("run flash --precision=fa16,", "precision 'fa16,': a part is empty"),
    ("compare flash 'flash --precision=,scores=float16'", "precision ',scores=float16': a part is empty"),
    ("run flash -t block_kv=64,block_kv=128", "-t block_kv: has two values, 64 and 128; write only one"),
    ("run flash -C group_count=5 -C group_count=6", "-C group_count: has two values, 5 and 6; write only one"),
    ("run gemm --problem m=5,m=6,n=1,k=1", "--problem m: has two values, 5 and 6; write only one"),
    ("run kernel.py::k[1](tensor(x)) --problem N=5,N=6", "--problem N: has two values, 5 and 6; write only one"),
    ("run kernel.py::k[1](tensor(x)) --problem eps=٥.٥", "--problem eps=٥.٥: write a number"),
    # -------------------- explore
    ("explore", "which schedule? For example: npusim explore flash"),
    ("explore flash", "name a field to explore: block_q,"),
    ("explore flsh -f depth=1", "unknown schedule 'flsh'. Did you mean `flash`? Allowed: allreduce,"),
    ("explore flash -f", "Option '-f' requires an argument."),
    ("explore flash -f depth", "field 'depth': write name=value,value,... or"),
    ("explore flash -f depth=", "field 'depth=': a value is empty"),
    ("explore flash -f depth=1,,2", "field 'depth=1,,2': a value is empty"),
    ("explore flash -f blok=1", "blok: unknown tiling field. Did you mean"),
    (
        "explore flash -f block_kv=128..512",
        "field 'block_kv=128..512': '128..512' is not a range; write start:stop:step",
    ),
    ("explore flash -f block_kv=1:2", "field 'block_kv=1:2': '1:2' is not a range; write"),
    ("explore flash -f block_kv=512:128:128", "field 'block_kv=512:128:128': '512:128:128' is an"),
    ("explore flash -f block_kv=128:512:0", "field 'block_kv=128:512:0': '128:512:0' is an"),
    ("explore flash -f block_kv=٦٤:١٢٨:٦٤", "field 'block_kv=٦٤:١٢٨:٦٤': '٦٤:١٢٨:٦٤' is not a range; write"),
    ("explore flash -f block_kv=١٢٨ -j1", "block_kv: expected a whole number, got '١٢٨'"),
    ("explore flash -f seq=٥١٢ -f block_kv=64", "seq=٥١٢: write positive whole numbers: 4096, 8k"),
    ("explore flash -f block_kv=64 -f block_kv=128", "--field block_kv: occurs twice; write all values in one"),
    ("explore flash -f block_kv=64 --precision=fa16, -j1", "precision 'fa16,': a part is empty"),
    ("explore flash -f block_kv=64 --kind local -j1", "kind: pangu_38b has no local layers; allowed: global"),
    (
        "explore flash -f block_kv=64 --resume -o none.csv",
        "none.sqlite: there is no such file; --resume continues an earlier",
    ),
    ("explore flash -f depth=1 -j 0", "Invalid value for '--jobs' / '-j'"),
    ("explore flash -f depth=1 --top 0", "Invalid value for '--top'"),
    ("explore flash -f precision=none", "precision 'none': not a preset of flash; allowed:"),
    ("explore flash -f scores=float17", "unknown number format 'float17'; near names:"),
    ("explore flash -f block_q=2048 -j1", "no point fits; runs/explore-flash-pang"),
    ("diff nope.npz flsh", "nope.npz: no such file; it must be an .npz or .safetensors with the kernel's"),
    ("explore flash -f depth=1 --hw h200", "depth: unknown tiling field; allowed: block_q,"),
    ("explore flash -f depth=1 -w pangu", "no workload named 'pangu'. Did you mean"),
    ("explore flash -f depth=1 --out file/a.csv", "file/a.sqlite: cannot be written: file is not a"),
    ("explore flash -f depth=1 --method x -j1", "method 'x'; allowed: auto, des, block,"),
    # -------------------- tune
    (
        "tune flash",
        "flash: a schedule has no list of configurations; name fields to rank: -f FIELD=VALUES (npusim run flash "
        "--fields lists the fields)",
    ),
    ("tune flash -f blok=1 -j1", "error: blok: unknown tiling field. Did you mean"),
    ("tune flash -f warps=4,8 -j1", "error: warps: unknown tiling field; allowed: block_q, block_kv,"),
    ("tune nope.py::k[1](x)", "nope.py: no such file"),
    ("tune flash -f block_kv=64 --seq 256 --bits Z -j1", "--bits Z: allowed: any, same, or a class: "),
    ("tune flash -f block_kv=64 --sizes seq=x -j1", "--sizes seq=x: write whole numbers: 4096, 4k"),
    # -------------------- probe
    ("probe bits", "Missing option '--out' / '-o'."),
    ("probe bits --hw nope -o x", "no device named 'nope'; allowed: a10, a100, a6000, ascend_910b1"),
    ("probe identify nope.npz", "nope.npz: no such file, and no packaged tensors of that name"),
    # -------------------- record
    ("record", "Missing argument 'PROGRAM'."),
    ("record nope.py", "nope.py: no such file; a program is script.py or script.py::function"),
    ("record nope.npz", "nope.npz: no such file; `npusim record script.py` writes one"),
    # -------------------- stress
    ("stress flash --over nonsense=1:2", "--over nonsense=1:2: unknown aspect; allowed: logit_std, logit_mean, "),
    ("stress flash --over logit_std=4:1", "--over logit_std=4:1: write logit_std=LOW:HIGH, LOW below HIGH and above 0"),
    (
        "stress flash --over equal=0.5",
        "--over equal=0.5: equal is a switch: write equal, or equal=1 (0: as in the base)",
    ),
    ("stress flash --over zero=0:1", "--over zero=0:1: zero is a switch: write zero"),
    ("stress flash --over padding=2,1", "--over padding=2,1: padding is a switch"),
    ("stress flash --budget 0", "--budget 0.0: write a number of seconds above 0"),
    ("stress flash --require max-rmse=x", "--require max-rmse x: write an error, such as 0.001"),
    # -------------------- report
    ("report", "Missing argument 'RUN...'."),
    ("record nope.npz -o z.npz", "--out: nope.npz is a file of recorded calls, which can only be listed"),
    ("record nope.npz -a m=3", "-a: nope.npz is a file of recorded calls, which can only be listed"),
    ("record nope.npz::f --floats -- 3", "--floats, ::f, arguments: nope.npz is a file of recorded calls"),
    ("report binary.yaml", "binary.yaml: not a JSON file: it is not text; a run folder or a"),
    ("report nope", "nope: cannot be read: No such file or directory; a run folder or a result.json is needed"),
    ("report empty.yaml", "empty.yaml: not a JSON file: Expecting value:"),
    ("run flash --seq 256 --report --no-save", "--report: --no-save writes nothing; remove it,"),
    ("run flash --seq 256 --timeline 5", "--timeline 5: write from and to in us, such as 0:50"),
    ("run flash --seq 256 --timeline 9:3", "--timeline 9:3: write from and to in us"),
    ("run flash --seq 256 --no-numerics --timeline 900:950", "--timeline 900:950 us: the timeline ends at"),
    (
        "help tiles",
        (
            "help tiles: there is no such guide or word. Did you mean `tile`? Guides: "
            "agents, ci, cluster, compare, device,"
        ),
    ),
    # -------------------- compare
    ("compare", "Missing argument 'RUN...'."),
    ("compare a", "compare a: compare needs two runs or more"),
    ("compare @9 @1", "@9: there is no such run; "),
    (
        "compare nope.npz flash",
        "nope.npz: there is no run folder or result of that name, and it is not a schedule: nope.npz: no such",
    ),
    ("compare a/nope a/nope", "a/nope: cannot be read: No such file or directory;"),
    (
        "compare nope nope",
        "nope: there is no run folder or result of that name, and it is not a schedule: unknown schedule 'nope'",
    ),
    ("compare flash 'flash --depth 3'", "No such option: --depth"),
    ("compare flash 'flash -t depth'", "-t depth: write -t key=value"),
    ("compare empty.yaml empty.yaml", "empty.yaml: not a JSON file: Expecting value:"),
    ("compare json_list.json json_list.json", "json_list.json: not a result of `npusim run` (no"),
    ("compare old.json old.json", "old.json: schema_version 0; this npusim reads 1"),
    ("compare deep.json deep.json", "deep.json: not a JSON file: maximum recursion"),
    ("compare 'fla\"sh' flash", 'fla"sh: cannot be split into the words of a command line: No closing quotation'),
    ("compare '' flash", "an argument: the value is empty"),
    ("compare ' ' flash", "an argument: the value is empty"),
    ("compare flash 'flash --precision='", "--precision: the value is empty"),
    ("compare flash flash --json --markdown", "--markdown: --json prints JSON"),
    # -------------------- diff
    ("diff", "Missing argument 'OUT'."),
    ("diff nope.npz", "which schedule? For example: npusim diff OUT flash"),
    (
        "diff nope.npz flash --hw h200",
        "nope.npz: no such file; it must be an .npz or .safetensors with the kernel's output",
    ),
    ("diff empty.yaml flash --hw h200", "empty.yaml: not a readable tensor file, or truncated"),
    ("diff ok.npz tiling_allreduce", "computes no output of attention to compare with"),
    # -------------------- invariant
    ("invariant nosuch", "unknown schedule 'nosuch'; allowed:"),
    ("invariant flash --require ''", "--require: the value is empty"),
    ("invariant flash --vary batch,", "--vary batch,: a name is empty"),
    # -------------------- check
    ("check", "Missing argument 'DIR'."),
    ("check nope --tolerance 1x", "--tolerance 1x: write a share from 0 to less than 1: 0.01, or 1%"),
    ("check nope --tolerance 100%", "--tolerance 100%: write a share from 0"),
    ("check nope --reason why", "--reason why: needs --update"),
    ("check nope", "nope: there is no such baseline or folder of baselines"),
    ("check nothing", "nothing: contains no baseline (*.yaml); `npusim"),
    ("check none.yaml", "none.yaml: there is no such baseline or folder of baselines"),
    ("check w.yaml", "w.yaml:1  schema: 'npusim.workload/1' is another"),
    ("check base_new.yaml", "1 of 1 baselines not met; accept with: npusim"),
    ("check base_schema.yaml", "base_schema.yaml:1  schema: 'npusim.baseline/9'"),
    ("check base_words.yaml", "base_words.yaml:6  tilings: unknown key. Did you"),
    # -------------------- validate
    ("import", "name the profile: npusim import msprof"),
    ("import msprof nowhere", "nowhere: cannot be read: No such file"),
    ("calibrate", "Missing argument 'FILE'."),
    ("calibrate nowhere.yaml", "nowhere.yaml: cannot be read: No such file"),
    ("export rows", "Missing argument 'FILE'."),
    ("export rows rows.csv -g m=4", "--grid: sizes m; needed: m, n and k, or heads, seq_q and head_dim,"),
    ("validate", "name a file of measured times (npusim validate --template"),
    ("validate h100", "h100: no such file; name a file of measured times (npusim"),
    ("validate w.yaml", "w.yaml:1  schema: 'npusim.workload/1' is another"),
    ("validate short.npz", "short.npz: not a readable tensor file, or truncated"),
    ("validate text.txt", "text.txt:1  the file is not a mapping"),
    ("validate measured.yaml --only zzz", "--only 'zzz' selects none of 1 cases:"),
    ("validate measured.yaml --band -1", "--band -1: write a share from 0 to less than"),
    ("validate measured.yaml --band x", "--band x: write a share from 0 to less than"),
    ("validate measured.yaml --band ٩%", "--band ٩%: write a share from 0 to less than"),
    ("validate measured.yaml", "predictions and measurements differ by more than"),
    ("validate odd_cases.yaml", "case a: dtype: 'float17' is not one of:"),
    ("validate empty_cases.yaml", "empty_cases.yaml:4  cases: needs at least 1 of"),
    ("validate measured.yaml --template", "FILE: --template prints a file"),
    # -------------------- hw
    ("hw", "Usage: npusim hw [OPTIONS] COMMAND [ARGS]..."),
    ("warm up", "Got unexpected extra argument(s) (up)"),
    ("hw shw", "No such command 'shw'. Did you mean 'show'?"),
    ("hw show", "Missing argument 'NAME|FILE'."),
    ("hw show tpu", "no device or node named 'tpu'; allowed:"),
    (
        "hw show ascend_910b2 --only nothing",
        "ascend_910b2 has no number whose key starts with 'nothing' (--only); allowed:",
    ),
    ("hw show ascend_910b2 --basis guess", "--basis guess; allowed: vendor, measured,"),
    ("hw show ascend_910b2 -C x=1", "-C x=1: there is no key 'x'; allowed: schema, name,"),
    ("hw show ascend_910b2 --json --only links", "--only: --json prints every number"),
    ("hw validate", "Missing argument 'FILE...'."),
    ("hw validate none.yaml", "faulty files: 1 of 1"),
    ("hw validate empty.yaml w.yaml", "faulty files: 2 of 2"),
    ("hw validate negative.yaml", "faulty files: 1 of 1"),
    # -------------------- workload
    ("workload", "Usage: npusim workload [OPTIONS] COMMAND [ARGS]..."),
    ("workload show", "Missing argument 'NAME|FILE'."),
    ("workload show pangu", "no workload named 'pangu'. Did you mean"),
    ("workload show device.yaml", "device.yaml:1  schema: 'npusim.device/1' is"),
    ("workload import", "Missing argument 'CONFIG'."),
    ("workload import none.json", "none.json: cannot be read: No such file or"),
    ("workload import text.txt", "text.txt:1  not valid JSON: Expecting value"),
    ("workload import json_list.json", "json_list.json:1  expected a JSON object, as in a"),
    ("workload import deep.json", "deep.json:1  not readable: maximum recursion"),
    ("workload import half.json", "half.json:1  num_attention_heads: missing"),
    ("workload import config.json --tp 3", "tensor_parallel: 3 does not divide 2 query heads;"),
    ("workload import config.json --seq 0", "--seq 0: write a positive whole number: 4096, 8k"),
    ("workload import config.json --name ../x", "config.json:1  name: '../x' has '/'; a name is"),
    ("workload import config.json --dtype float8", "Invalid value for '--dtype'"),
    ("workload import config.json --out x.txt", "--out x.txt: workload files end in .yaml"),
    # -------------------- layout
    ("program", "which schedule? For example: npusim program flash"),
    ("program flsh", "unknown schedule 'flsh'. Did you mean `flash`?"),
    ("program flash --diff flsh", "unknown schedule 'flsh'. Did you mean `flash`?"),
    ("program flash --hw xeon_avx512 -t block_kv=0", "block_kv: '0' must be at least 8"),
    ("explore flash -f block_kv=64 --seq 64 --cluster nowhere", "--cluster nowhere: no Dask scheduler answers"),
    ("layout", "Missing argument 'INSTRUCTION'."),
    ("layout m9n9k9", "unknown instruction 'm9n9k9': choose one of"),
    ("layout m8n8k4 --acc f64", "Invalid value for '--acc'"),
    ("layout m8n8k4 --operand d", "Invalid value for '--operand'"),
    ("layout m8n8k4 --arrangement 3x3", "arrangement 3x3: m8n8k4 has 4 groups of lanes,"),
    ("layout m16n8k16 --a col", "m16n8k16: A is always row and B col, not col and"),
    ("format mxfp9", "unknown number format 'mxfp9'; near names: mxfp8, mxfp4"),
    ("format mxfp4 --rule flor", "unknown scale rule 'flor'; near names: floor"),
    ("format mxint8 --rule te", "scale rule 'te' gives float8_e4m3fn scales of any element; mxint8 has"),
    ("format float16 --rule floor", "--rule: float16 has no scale; formats with a scale: mxfp8,"),
    ("format mxfp4 --values 1,a", "--values 1,a: write finite numbers, such as 0.3,-1,5"),
    (
        "format nvfp4 --values 1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17",
        "--values: 17 numbers; a block of nvfp4 has 16",
    ),
    ("new schedule flash", "'flash' is a packaged schedule; choose another name"),
    ("new schedule 2nd", "'2nd' cannot be the name of a schedule"),
    ("new kernel mine", "No such command 'kernel'"),
    ("run mine.py:MINE", "no such file; a schedule of your own is FILE.py:NAME"),
    ("run no.such.module:MINE", "module no.such.module: ModuleNotFoundError"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("odd")
    write_odd_files(found)
    return found


@pytest.mark.parametrize(("command", "message"), WRONG, ids=[command for command, _ in WRONG])
def test_a_wrong_command_says_what_is_wrong(
    command: str, message: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.delenv("COLUMNS", raising=False)
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir() if path.name != "runs"}
    result = CliRunner().invoke(app, shlex.split(command))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code in (1, 2)
    assert "Traceback" not in result.stderr
    assert message in " ".join(result.stderr.split("\n"))
    assert result.stderr.startswith(("npusim: ", "Usage: ", "wrote runs/explore-"))
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir() if path.name != "runs"} == before


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("run flash --sq 5", "npusim: error: No such option: --sq (Possible options: --seq, --seq-kv, --seq-q)"),
        ("run flash --seq", "npusim: error: Option '--seq' requires an argument."),
        (
            "explore flash --jobs many",
            "npusim: error: Invalid value for '--jobs' / '-j': Input should be a valid integer",
        ),
        ("hw shw", "npusim: error: No such command 'shw'. Did you mean 'show'?"),
        ("--frm", "npusim: error: No such option: --frm"),
    ],
)
@pytest.mark.parametrize("width", [50, None])
def test_a_usage_error_is_an_error_as_all_others(
    command: str, message: str, width: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is folded at a terminal's width, and one line in a pipe; exit code 2."""
    monkeypatch.setattr("npusim.cli.console._message_width", lambda: width)
    result = CliRunner().invoke(app, shlex.split(command))
    assert (result.exit_code, result.stdout) == (2, "")
    said = result.stderr[result.stderr.index("npusim: error:") :]
    assert message in " ".join(said.split())
    assert len(said.splitlines()) == 1 if width is None else max(map(len, said.splitlines())) <= width


def test_there_are_a_hundred_and_fifty_of_every_verb() -> None:
    commands = [command for command, _ in WRONG]
    assert len(set(commands)) == len(commands) >= 150
    verbs = get_group(app).commands
    assert len(verbs) == 25
    assert set(verbs) <= {command.split()[0] for command in commands}
