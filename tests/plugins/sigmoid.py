"""Attention without softmax: O = sigmoid(scale Q K^T - log keys) V, with the reference that its errors are against."""

from math import inf, log

import numpy as np

from npusim.kernel import (
    FLASH,
    Attributes,
    FlashPrecision,
    Loop,
    Opcode,
    Stage,
    attention_cells,
    attention_phase,
    attention_scores,
    attention_tensors,
    causal_mask,
    choose,
    flash_names,
    for_inputs,
    replace,
    row,
    schedule,
)

#: P = 1 / (1 + exp(-x)); S holds -x, and +Inf where the mask hides a key: P is 0 there.
SIGMOID = (
    row(Opcode.CAST, "S", "S_in"),
    row(Opcode.MUL, "S", "S", "minus_scale"),
    row(Opcode.ADD, "S", "S", "log_keys"),
    row(Opcode.SELECT, "S", "mask", "S", "hidden", only="mask"),
    row(Opcode.CAST, "E", "S"),
    row(Opcode.EXP, "P", "E"),
    row(Opcode.ADD, "P", "P", "one"),
    row(Opcode.DIV, "P", "one", "P"),
    row(Opcode.CAST, "P_out", "P"),
)
UPDATE = Stage("update", (row(Opcode.CAST, "T", "T_in"), row(Opcode.ADD, "O", "O", "T")))
FINISH = Stage("finish", (row(Opcode.CAST, "out", "O"),))
FP32 = FlashPrecision(
    "fp32", scores="float32", softmax="float32", exponential="float32", operand="input", running="float32",
    product="float32", output="input",
)  # fmt: skip


def reference(q, k, v, problem, row):
    return 1 / (1 + np.exp(log(problem.seq_kv) - attention_scores(q, k, problem, row))) @ v


def phases(problem, tiling, precision):
    p, sizes = for_inputs(precision, problem.dtype), (tiling.block_q, tiling.block_kv)
    cells, mask = attention_cells(problem, *sizes), causal_mask(problem, sizes)
    names = flash_names(p, problem.dtype, is_masked=mask is not None)
    constants = {"minus_scale": -problem.scale, "log_keys": log(problem.seq_kv), "hidden": inf, "one": 1.0}
    phase = attention_phase(problem, sizes, cells, names, attention_tensors(problem, p.output), constants, mask)
    sigmoid = Stage("sigmoid", choose(SIGMOID, {Opcode.EXP: Attributes(variant=p.exp_variant)}))
    return [replace(phase, loops=(Loop((FLASH["S"], sigmoid, FLASH["PV"], UPDATE), "key"),), finish=(FINISH,))]


SIGMOID_ATTENTION = schedule("sigmoid", phases, precisions=[FP32], reference=reference)
