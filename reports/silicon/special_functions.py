"""Instructions of a GPU's special function unit compared with float64, and with `npusim.formats.cuda_functions`.

``python reports/silicon/special_functions.py OUT.npz`` needs the CUDA driver and numpy.  It prints, for each
instruction, how many results of its binades differ from the nearest float32 and by how many ulp, and whether the other
binades repeat these differences; it writes the differences (int8).  On an H100 and an H200 (driver 580.159.04): of
``sqrt`` 2^24 patterns, 2,602,502 are 1 ulp low and 227,301 high; of ``rsqrt`` 2,344,391 and 8 (2 ulp) low, 1,289,731
high; of ``rcp`` 2^23 patterns, 374,723 low and 733,799 high; of ``ex2`` 2^23 fractions, 3,093 low and 3,259,640 high.
All binades of normal numbers are alike.
"""

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

PTX = """.version 8.0
.target sm_70
.address_size 64
.visible .entry each(.param .u64 D, .param .u32 B) {{
.reg .b32 r<9>; .reg .b64 d<4>; .reg .f32 f<4>;
ld.param.u64 d0, [D]; ld.param.u32 r0, [B];
mov.u32 r1, %ctaid.x; mov.u32 r2, %ntid.x; mov.u32 r3, %tid.x; mad.lo.u32 r1, r1, r2, r3;
{argument}
{instruction}.approx.ftz.f32 f1, f0;
mul.wide.u32 d1, r1, 4; add.u64 d1, d0, d1; st.global.f32 [d1], f1; ret; }}
\0"""
#: Arguments: consecutive patterns; and whole numbers of steps of 2^-23, which is all that ex2 reads of a number.
PATTERNS, STEPS = "add.u32 r2, r0, r1; mov.b32 f0, r2;", "cvt.rn.f32.u32 f0, r1; mul.f32 f0, f0, 0f34000000;"
BINADE, BIAS = 1 << 23, 127


class Instruction:
    """An instruction of the first GPU on 2^23 or 2^24 arguments."""

    def __init__(self, name: str, argument: str, count: int) -> None:
        self.driver, context, module = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_void_p()
        self.function, self.memory, self.count = ctypes.c_void_p(), ctypes.c_uint64(), count
        self.check(self.driver.cuInit(0))
        self.check(self.driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
        self.check(self.driver.cuCtxSetCurrent(context))
        text = PTX.format(argument=argument, instruction=name).encode()
        self.check(self.driver.cuModuleLoadData(ctypes.byref(module), text))
        self.check(self.driver.cuModuleGetFunction(ctypes.byref(self.function), module, b"each"))
        self.check(self.driver.cuMemAlloc_v2(ctypes.byref(self.memory), ctypes.c_size_t(4 * count)))

    @staticmethod
    def check(code: int) -> None:
        """Raise `OSError` for an error of the driver."""
        if code:
            raise OSError(code, "the CUDA driver refused")

    def results(self, first: int) -> Any:
        """Return the patterns of results (int32); ``first``: the first argument's pattern."""
        values, host = (ctypes.c_uint64(self.memory.value), ctypes.c_uint32(first)), np.empty(self.count, np.int32)
        pointers = (ctypes.c_void_p * 2)(*[ctypes.cast(ctypes.byref(v), ctypes.c_void_p) for v in values])
        blocks = self.count // 256
        self.check(self.driver.cuLaunchKernel(self.function, blocks, 1, 1, 256, 1, 1, 0, None, pointers, None))
        self.check(self.driver.cuCtxSynchronize())
        self.check(self.driver.cuMemcpyDtoH_v2(host.ctypes, self.memory, ctypes.c_size_t(host.nbytes)))
        return host


#: The function in float64, its arguments, binades that its table has, and binades that the exponent falls by in two.
FUNCTIONS: dict[str, tuple[Callable[[Any], Any], str, int, int]] = {
    "sqrt": (np.sqrt, PATTERNS, 2, -1),
    "rsqrt": (lambda x: 1 / np.sqrt(x), PATTERNS, 2, 1),
    "rcp": (np.reciprocal, PATTERNS, 1, 2),
    "ex2": (np.exp2, STEPS, 1, 0),
}


def main(path: str) -> None:
    """Measure, print and write."""
    tables = {}
    for name, (function, argument, binades, falls) in FUNCTIONS.items():
        each, places = Instruction(name, argument, binades * BINADE), np.arange(binades * BINADE, dtype=np.int32)
        first = each.results(BIAS * BINADE)
        x = places / BINADE if argument is STEPS else (places + BIAS * BINADE).view(np.float32).astype(np.float64)
        difference = first - function(x).astype(np.float32).view(np.int32)
        tables[f"{name}_float32"] = difference.astype(np.int8)
        others = range(1, 252, binades) if argument is PATTERNS else ()
        moved = {e: first - (e - BIAS) * falls // 2 * BINADE for e in others}
        alike = sum(np.array_equal(each.results(e * BINADE), wanted) for e, wanted in moved.items())
        counts = dict(zip(*(c.tolist() for c in np.unique(difference, return_counts=True)), strict=True))
        print(f"{name}: ulp {counts}; {alike} of {len(moved)} others alike")
    np.savez_compressed(Path(path), **tables)


if __name__ == "__main__":
    main(sys.argv[1])
