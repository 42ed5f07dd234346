"""Linear attention (Katharopoulos et al. 2020) without its normalisation: O = Q S, where S = K^T V is one a head."""

from npusim.kernel import FlashPrecision, GlobalTensor, full, grid, kernel, schedule, tiles, with_columns

TOKENS, ROWS = 128, 64


@kernel(results="s", k="token key", v="token value")
def state(k, v, fmt):
    s = full("key value", 0.0, "float32")
    for kj, vj in tiles(k, v):
        s = s + (kj.T @ vj).to("float32")
    return s.to(fmt)


@kernel(results="o", q="row key", s="key value")
def read(q, s, fmt):
    return (q @ s).to("float32").to(fmt)


def phases(problem, tiling, p, machine):
    d, width, fmt = problem.head_dim, problem.value_head_dim, problem.dtype

    def tensor(n, heads, rows, cols, role="input"):
        return GlobalTensor(n, problem.batch, heads, rows, cols, fmt, role)

    q, o = tensor("q", problem.heads, problem.seq_q, d), tensor("o", problem.heads, problem.seq_q, width, "output")
    k, v = tensor("k", problem.kv_heads, problem.seq_kv, d), tensor("v", problem.kv_heads, problem.seq_kv, width)
    s = tensor("s", problem.kv_heads, d, width, "workspace")
    of_state, of_rows = ({"key": ROWS, "value": width, "token": TOKENS}, {"row": ROWS, "value": width, "key": d})
    blocks = with_columns(grid(s, ("key", ROWS), ("value", width)), problem.seq_kv, TOKENS)
    rows = grid(o, ("row", ROWS), ("value", width))
    return [
        state.phase("state", blocks, of_state, [s], k=k, v=v, fmt=fmt),
        read.phase("read", rows, of_rows, [o], q=q, s=s, fmt=fmt),
    ]


def reference(q, k, v, problem, row, tiling):
    return q @ (k.T @ v)


LINEAR_ATTENTION = schedule(
    "linear_attention", phases, precisions=[FlashPrecision("stored")], reference=reference, summary="O = Q (K^T V)"
)
