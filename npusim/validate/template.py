"""A file of measured times to begin with, as ``npusim validate --template`` prints it."""

from __future__ import annotations

TEMPLATE = """\
# Times measured on hardware, to hold predictions against:  npusim validate FILE
# The numbers here are examples, no measurements.  Keys are the words of `npusim run`; all but those
# marked (needed) may be left out.
schema: npusim.measurements/1
source: "who measured it, when, with what"           # (needed)
band: 0.25                  # relative error allowed, for cases without their own; none: nothing fails

cases:
  # A workload by name (npusim workload list), or your own .yaml file.
  - name: flash_1k                                   # (needed) unique in the file
    hw: ascend_910b2                                 # (needed) npusim hw list, or your own .yaml
    schedule: flash                                  # (needed) npusim run lists them
    workload: pangu_38b                              # (needed) a name, or sizes as below
    seq: 1024               # or seq_q and seq_kv; batch, tensor_parallel, causal, dtype
    tiling: {block_kv: 256} # absent: the schedule's default; npusim run flash --fields
    precision: fa2_fp32     # absent: the schedule's default
    measured: {latency_us: 50}                       # (needed) microseconds: one number ...

  # Sizes written out: of one device's attention, ...
  - name: flash_sizes
    hw: ascend_910b2
    schedule: flash
    workload: {batch: 1, heads: 5, kv_heads: 5, seq_q: 512, seq_kv: 512, head_dim: 128, causal: true}
    measured: {latency_us: [18, 24]}                 # ... or the range it was in
    # Other quantities: core_us (without launch), mac_us, mte1_us, mte2_us, fixp_us, vec_us (a pipe's busy
    # time), tflops, speedup (over `baseline:`), of nodes compute_us, attention_us, linear_us, allreduce_us, and of
    # offloading upload_us, gpu_us, cpu_us, off_upload_us.
    band: 0.3               # of this case alone
    # What a latency is: call (absent: one call that is waited for), core (the slowest core's busy time),
    # kernel (the profiler's task duration), back_to_back (N calls that are not waited for, over N).
    timing: back_to_back
    host_floor_us: 16.5     # what the host takes there; a latency that it decides is in no figure
    warm: false             # whether inputs lie in L2 when the kernel starts

  # ... of a matrix product, or of a copy.
  - name: product
    hw: ascend_910b2
    schedule: gemm
    workload: {m: 1024, n: 1024, k: 1024, dtype: float16}
    measured: {latency_us: 32}

  - name: copy
    hw: ascend_910b2
    schedule: copy
    workload: {bytes: 16777216}
    measured: {latency_us: 35}

  # Cases of one group differ in tiling only: their ranking is judged (Kendall's tau, regret).
  - name: flash_1k_wide
    group: kv_tiles
    hw: ascend_910b2
    schedule: flash
    workload: pangu_38b
    seq: 1024
    tiling: {block_kv: 512}
    measured: {latency_us: 55}
"""
