"""FlashAttention with another softmax order: the scale joins the exponent, P is summed as it is stored."""

from npusim.kernel import (
    FLASH,
    FlashPrecision,
    Loop,
    Opcode,
    Stage,
    attention_cells,
    attention_tensors,
    causal_mask,
    flash,
    for_inputs,
    replace,
    row,
    schedule,
)  # fmt: skip

O = Opcode  # noqa: E741
SOFTMAX = Stage("softmax", (
    row(O.CAST, "S", "S_in"),
    row(O.SELECT, "S", "mask", "S", "masked", only="mask"),
    row(O.ROW_MAX, "m_tile", "S"),
    row(O.MAX, "m_new", "m", "m_tile"),
    row(O.SUB, "m_shift", "m", "m_new"),
    row(O.MUL, "m_shift", "m_shift", "scale"),
    row(O.CAST, "exponent", "m_shift"),
    row(O.EXP, "alpha", "exponent"),
    row(O.CAST, "rescale", "alpha"),
    row(O.COPY, "m", "m_new"),
    row(O.SUB, "S", "S", "m_new"),
    row(O.MUL, "S", "S", "scale"),
    row(O.CAST, "E", "S"),
    row(O.EXP, "P", "E"),
    row(O.ROW_SUM, "l_tile", "P"),
    row(O.CAST, "P_out", "P"),
    row(O.CAST, "l_add", "l_tile"),
    row(O.MUL, "l", "l", "rescale"),
    row(O.ADD, "l", "l", "l_add"),
))  # fmt: skip
FP32 = FlashPrecision("fp32", *["float32"] * 3, "input", "float32", "float32", "input", exp_variant="exp.correct",
                      sum_order="tree_halves")


def phases(problem, tiling, precision):
    p, sizes = for_inputs(precision, problem.dtype), (tiling.block_q, tiling.block_kv)
    usual = flash(problem, sizes, attention_cells(problem, *sizes), p, attention_tensors(problem, p.output),
                  causal_mask(problem, sizes))
    body = (FLASH["S"], SOFTMAX, FLASH["PV"], FLASH["update"])
    choices = {O.ROW_SUM: p.sum_order}
    rows = tuple(replace(r, attributes=replace(r.attributes, order=choices.get(r.opcode, ""))) for r in SOFTMAX.rows)
    return [replace(usual, loops=(Loop((body[0], Stage("softmax", rows), *body[2:]), "key"),))]


LATE_SCALE = schedule("late_scale", phases, precisions=[FP32], summary="softmax of unscaled scores")
