"""Measure warp groups that share a multiprocessor of an H200: in which order the tensor cores process products, and how
much running products slow a softmax down.

    python reports/silicon/groups.py OUT.json

Needs nvcc for sm_90a and a GPU.  `order`: for each warp group cycles after the first one's begin at which it issues its
first product, has issued its last one, and has all results.  `softmax`: cycles of the softmax of 64 x 128 scores of a
warp group (with 64 x 64 outputs to rescale, as FlashAttention-3 has it) where one or two groups compute it, alone
and beside a group whose products of 64 x 128 x 16 follow one another; and cycles of eight such products.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

HEAD = r"""
#include <cstdio>
#include <cstdint>
#include <cuda_runtime.h>
#define FENCE asm volatile("wgmma.fence.sync.aligned;":::"memory")
#define COMMIT asm volatile("wgmma.commit_group.sync.aligned;":::"memory")
#define WAIT(n) asm volatile("wgmma.wait_group.sync.aligned %0;"::"n"(n):"memory")
__device__ inline uint64_t descriptor(char* sm) {
    for (int i = threadIdx.x; i < 32768; i += blockDim.x) ((int*)sm)[i] = 0;
    asm volatile("fence.proxy.async;":::"memory");
    __syncthreads();
    uint64_t at = __cvta_generic_to_shared(sm);
    return ((at & 0x3FFFF) >> 4) | ((uint64_t)1 << 16) | ((uint64_t)64 << 32) | ((uint64_t)1 << 62);
}
__global__ void __launch_bounds__(256, 1) order(long long* out, float* sink, int delay) {
    extern __shared__ __align__(1024) char sm[];
    uint64_t a = descriptor(sm), b = a + 2048;
    int g = threadIdx.x / 128;
    long long t[3];
    float c[64] = {};
    for (int r = 0; r < 4; r++) {
        __syncthreads();
        long long begin = clock64();
        while (clock64() < begin + 200 + (long long)g * delay) {}
        t[0] = clock64();
        FENCE; PRODUCTS_16 COMMIT;
        t[1] = clock64();
        WAIT(0); TOUCH
        t[2] = clock64();
    }
    if (threadIdx.x % 128 == 0) for (int i = 0; i < 3; i++) out[3 * g + i] = t[i];
    float s = 0;
    for (int i = 0; i < 64; i++) s += c[i];
    sink[threadIdx.x] = s;
}
__global__ void __launch_bounds__(384, 1) softmax(long long* out, float* sink, int products, int reps) {
    extern __shared__ __align__(1024) char sm[];
    uint64_t a = descriptor(sm), b = a + 2048;
    int g = threadIdx.x / 128;
    float z = 0;
    if (g == 0) {
        float c[64] = {};
        __syncthreads();
        long long begin = clock64();
        for (int r = 0; r < products; r++) { FENCE; PRODUCTS_8 COMMIT; WAIT(1); }
        WAIT(0); TOUCH
        if (threadIdx.x == 0) out[0] = clock64() - begin;
        for (int i = 0; i < 64; i++) z += c[i];
    } else {
        float s[64], o[32], m = -1e30f, l = 0, scale = 0.125f;
        uint32_t p[32];
        for (int i = 0; i < 64; i++) s[i] = threadIdx.x * 0.01f + i, o[i & 31] = 1;
        __syncthreads();
        long long begin = clock64();
        for (int r = 0; r < reps; r++) {
            #pragma unroll
            for (int h = 0; h < 2; h++) {
                float top = m, alpha, sum;
                #pragma unroll
                for (int i = 0; i < 32; i++) top = fmaxf(top, s[h * 32 + i]);
                top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
                top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
                asm volatile("ex2.approx.ftz.f32 %0,%1;":"=f"(alpha):"f"((m - top) * scale));
                m = top, sum = l * alpha;
                #pragma unroll
                for (int i = 0; i < 32; i++) {
                    float e, x = fmaf(s[h * 32 + i], scale, -top * scale);
                    asm volatile("ex2.approx.ftz.f32 %0,%1;":"=f"(e):"f"(x));
                    s[h * 32 + i] = e, sum += e;
                }
                l = sum;
                #pragma unroll
                for (int i = 0; i < 16; i++)
                    asm volatile("cvt.rn.f16x2.f32 %0,%1,%2;":"=r"(p[h * 16 + i])
                        :"f"(s[h * 32 + 2 * i]), "f"(s[h * 32 + 2 * i + 1]));
                #pragma unroll
                for (int i = 0; i < 16; i++) o[h * 16 + i] *= alpha;
            }
            #pragma unroll
            for (int i = 0; i < 32; i++) asm volatile(""::"r"(p[i]));
            #pragma unroll
            for (int i = 0; i < 32; i++) asm volatile("":"+f"(o[i]));
        }
        if (threadIdx.x % 128 == 0) out[g] = clock64() - begin;
        for (int i = 0; i < 64; i++) z += o[i & 31] + s[i];
    }
    sink[threadIdx.x] = z;
}
int main() {
    long long *d, h[8];
    float* s;
    cudaMalloc(&d, 4096), cudaMalloc(&s, 65536);
    cudaFuncSetAttribute(order, cudaFuncAttributeMaxDynamicSharedMemorySize, 200000);
    cudaFuncSetAttribute(softmax, cudaFuncAttributeMaxDynamicSharedMemorySize, 200000);
    for (int delay = 50; delay <= 400; delay += 350) {
        order<<<1, 256, 200000>>>(d, s, delay), cudaMemcpy(h, d, 64, cudaMemcpyDeviceToHost);
        printf("order %d %lld %lld %lld %lld %lld %lld\n", delay, 0LL, h[1] - h[0], h[2] - h[0], h[3] - h[0],
               h[4] - h[0], h[5] - h[0]);
    }
    for (int groups = 1; groups <= 2; groups++)
        for (int c = 0; c < 3; c++) {
            int products[3] = {0, 6000, 200}, reps[3] = {50, 50, 3000};
            softmax<<<1, 128 * (groups + 1), 200000>>>(d, s, products[c], reps[c]);
            cudaMemcpy(h, d, 64, cudaMemcpyDeviceToHost);
            printf("softmax %d %d %.1f %.1f\n", groups, c, products[c] ? double(h[0]) / products[c] : 0.,
                   double(h[1]) / reps[c]);
        }
    return cudaDeviceSynchronize();
}
"""


def product(index: int) -> str:
    """Return one product of 64 x 128 x 16, both operands in shared memory."""
    places, outputs = ",".join(f"%{i}" for i in range(64)), ",".join(f'"+f"(c[{i}])' for i in range(64))
    return (
        f'asm volatile("{{wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {{{places}}},%64,%65,1,1,1,0,0;}}"'
        f':{outputs}:"l"(a+{index % 4 * 2}),"l"(b+{index % 4 * 2}));'
    )


def main() -> None:
    """Write both measurements."""
    source = HEAD.replace("PRODUCTS_16", " ".join(map(product, range(16))))
    source = source.replace("PRODUCTS_8", " ".join(map(product, range(8))))
    source = source.replace("TOUCH", " ".join(f'asm volatile("":"+f"(c[{i}])::"memory");' for i in range(64)))
    with tempfile.TemporaryDirectory() as folder:
        code, binary = Path(folder, "groups.cu"), Path(folder, "groups")
        code.write_text(source, encoding="utf-8")
        subprocess.run(
            ["nvcc", "-w", "-O3", "-gencode", "arch=compute_90a,code=sm_90a", "-o", binary, code], check=True
        )
        lines = subprocess.run([binary], check=True, capture_output=True, text=True).stdout.split("\n")
    rows = [[float(x) if "." in x else int(x) for x in line.split()[1:]] for line in lines if line]
    names = [line.split()[0] for line in lines if line]
    result = {
        kind: [row for name, row in zip(names, rows, strict=True) if name == kind] for kind in dict.fromkeys(names)
    }
    Path(sys.argv[1]).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
