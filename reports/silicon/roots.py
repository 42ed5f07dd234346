"""Every sqrt.approx.ftz.f32 of a GPU beside its sqrt.rn.f32: what `sqrt.hopper_approx` is; needs the CUDA driver alone.

``python reports/silicon/roots.py OUT.z`` prints how many differ, by how many ulp, in all pairs of binades, and whether
they do so alike; it writes the differences of [1, 4), int8, as zlib's.  On an H100 (driver 580.159.04) all 126 pairs of
normal numbers are alike: of 2^24 roots 2,602,502 are 1 ulp low, 227,301 1 ulp high; of subnormals 0, of negatives NaN.
"""

import ctypes
import sys
import zlib
from pathlib import Path

PTX = b""".version 8.0
.target sm_70
.address_size 64
.visible .entry roots(.param .u64 D, .param .u32 B) {
.reg .b32 r<9>; .reg .b64 d<4>; .reg .f32 f<4>;
ld.param.u64 d0, [D]; ld.param.u32 r0, [B];
mov.u32 r1, %ctaid.x; mov.u32 r2, %ntid.x; mov.u32 r3, %tid.x; mad.lo.u32 r1, r1, r2, r3;
add.u32 r2, r0, r1; mov.b32 f0, r2; sqrt.approx.ftz.f32 f1, f0; sqrt.rn.f32 f2, f0;
mov.b32 r4, f1; mov.b32 r5, f2; sub.s32 r6, r4, r5; max.s32 r6, r6, -100; min.s32 r6, r6, 100;
cvt.u64.u32 d1, r1; add.u64 d1, d0, d1; st.global.u8 [d1], r6; ret; }
\0"""
PAIR = 1 << 24  # patterns of two binades


class Roots:
    """The kernel on the first GPU."""

    def __init__(self) -> None:
        self.driver, context, module = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_void_p()
        self.function, self.memory = ctypes.c_void_p(), ctypes.c_uint64()
        self.check(self.driver.cuInit(0))
        self.check(self.driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
        self.check(self.driver.cuCtxSetCurrent(context))
        self.check(self.driver.cuModuleLoadData(ctypes.byref(module), PTX))
        self.check(self.driver.cuModuleGetFunction(ctypes.byref(self.function), module, b"roots"))
        self.check(self.driver.cuMemAlloc_v2(ctypes.byref(self.memory), ctypes.c_size_t(PAIR)))

    @staticmethod
    def check(code: int) -> None:
        """Raise `OSError` for an error of the driver."""
        if code:
            raise OSError(code, "the CUDA driver refused")

    def differences(self, exponent: int) -> bytes:
        """Return approximate less correct, in ulp, int8, of the patterns of two binades from an exponent on."""
        host, values = (ctypes.c_char * PAIR)(), (ctypes.c_uint64(self.memory.value), ctypes.c_uint32(exponent << 23))
        pointers = (ctypes.c_void_p * 2)(*[ctypes.cast(ctypes.byref(v), ctypes.c_void_p) for v in values])
        self.check(self.driver.cuLaunchKernel(self.function, PAIR // 256, 1, 1, 256, 1, 1, 0, None, pointers, None))
        self.check(self.driver.cuCtxSynchronize())
        self.check(self.driver.cuMemcpyDtoH_v2(host, self.memory, ctypes.c_size_t(PAIR)))
        return host.raw


def main(path: str) -> None:
    """Measure, print and write."""
    roots = Roots()
    first = roots.differences(127)
    alike = sum(roots.differences(exponent) == first for exponent in range(1, 253, 2))
    counts = {n: first.count(bytes([n % 256])) for n in range(-100, 101) if bytes([n % 256]) in first}
    print(f"ulp: {counts} of {PAIR}; {alike} of 126 pairs of binades alike")
    Path(path).write_bytes(zlib.compress(first, 9))


if __name__ == "__main__":
    main(sys.argv[1])
