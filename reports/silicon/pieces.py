"""Kernels of our own that `measure_h200.py` times: pieces of an attention's loop, and loops over local memory."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def part(
    q_,
    k_,
    v_,
    o_,
    keys,
    d: tl.constexpr,
    bm: tl.constexpr,
    bn: tl.constexpr,
    exponential: tl.constexpr,
    reduced: tl.constexpr,
    stages: tl.constexpr,
):
    """Two products a tile of keys; between them nothing, exponentials, or exponentials and a row's maximum and sum."""
    head = tl.program_id(1).to(tl.int64) * keys * d
    rows = tl.program_id(0) * bm + tl.arange(0, bm)
    cols = tl.arange(0, d)
    step = tl.arange(0, bn)
    query = tl.load(q_ + head + rows[:, None] * d + cols[None])
    output = tl.zeros([bm, d], tl.float32)
    total = tl.zeros([bm], tl.float32)
    for at in tl.range(0, keys, bn, num_stages=stages):
        key = tl.load(k_ + head + (at + step)[:, None] * d + cols[None])
        weights = tl.dot(query, tl.trans(key))
        if reduced:
            weights = tl.math.exp2(weights - tl.max(weights, 1)[:, None])
            total += tl.sum(weights, 1)
        elif exponential:
            weights = tl.math.exp2(weights)
        value = tl.load(v_ + head + (at + step)[:, None] * d + cols[None])
        output = tl.dot(weights.to(tl.float16), value, output)
    tl.store(o_ + head + rows[:, None] * d + cols[None], (output + total[:, None]).to(tl.float16))


#: Each thread processes a frame of F words of local memory: loads B of them, works W FFMA a word, stores them.
FRAMES = r"""
#include <cstdio>
#include <algorithm>
#include <vector>
#include <cuda_runtime.h>
template <int F, int B, int W, int S>
__global__ void __launch_bounds__(256) loop(long long *took, float *sink, int n, int zero) {
  extern __shared__ char unused[];
  float frame[F];
  // A place that only running tells keeps the frame out of registers.
  for (int i = 0; i < F; i++) frame[i + zero * i] = i + threadIdx.x;
  float x[B], c = 1.0001f, t = 0;
  __syncthreads();
  long long begun = clock64();
  for (int k = 0; k < n; k++) {
#pragma unroll
    for (int i = 0; i < F; i += B) {
#pragma unroll
      for (int j = 0; j < B; j++) x[j] = frame[(i + j) ^ zero];
#pragma unroll
      for (int w = 0; w < W; w++)
#pragma unroll
        for (int j = 0; j < B; j++) x[j] = fmaf(x[j], c, c);
#pragma unroll
      for (int j = 0; j < B; j++) {
        if (S) frame[(i + j) ^ zero] = x[j];
        else t += x[j];
      }
    }
    __syncthreads();
  }
  long long end = clock64();
  if (threadIdx.x == 0) took[blockIdx.x] = end - begun;
  t += frame[zero];
  if (t == 12345.f) sink[0] = t + frame[3] + unused[0];
}
static long long *took;
static float *sink;
template <int F, int B, int W, int S>
void run(int warps) {
  for (int shared : {0, 20480, 40960, 81920, 110000})
    for (int blocks : {1, 2}) {
      if (blocks * (shared + 1024) > 233472 || blocks * warps > 32) continue;
      auto *kernel = loop<F, B, W, S>;
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
      int most = 0;
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&most, kernel, warps * 32, shared);
      if (most < blocks) continue;
      int n = 20;
      std::vector<long long> host(132 * blocks);
      double cycles[2];
      for (int part = 0; part < 2; part++) {
        for (int again = 0; again < 2; again++) kernel<<<132 * blocks, warps * 32, shared>>>(took, sink, n << part, 0);
        cudaMemcpy(host.data(), took, host.size() * 8, cudaMemcpyDeviceToHost);
        std::sort(host.begin(), host.end());
        cycles[part] = host[host.size() / 2];
      }
      if (cudaGetLastError() != cudaSuccess) { printf("{\"error\": 1}\n"); continue; }
      printf("{\"words\": %d, \"burst\": %d, \"work\": %d, \"stored\": %d, \"warps\": %d, "
             "\"shared\": %d, \"blocks\": %d, \"fit\": %d, \"cycles\": %.1f}\n",
             F, B, W, S, warps, shared, blocks, most, (cycles[1] - cycles[0]) / n);
    }
}
int main() {
  cudaMalloc(&took, 1 << 20);
  cudaMalloc(&sink, 64);
  for (int warps : {4, 8}) {
    run<48, 1, 4, 1>(warps); run<48, 4, 4, 1>(warps); run<48, 16, 4, 1>(warps);
    run<144, 1, 4, 1>(warps); run<144, 4, 4, 1>(warps); run<144, 16, 4, 1>(warps);
    run<288, 1, 4, 1>(warps); run<288, 4, 4, 1>(warps); run<288, 16, 4, 1>(warps); run<288, 4, 4, 0>(warps);
  }
}
"""
