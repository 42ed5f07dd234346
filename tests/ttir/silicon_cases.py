"""Launches of `silicon_kernels` on drawn inputs: what `reports/silicon/triton_bits.py` runs on a GPU."""

from __future__ import annotations

from hashlib import sha256
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

BF16, E4M3, E5M2 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
F16, F32, I32 = np.float16, np.float32, np.int32
HALVES = ((F16, "f16"), (BF16, "bf16"))
FLOATS = (*HALVES, (F32, "f32"))


class Case(NamedTuple):
    """A launch: arguments by parameter, arrays of zeros are results; constants and options of the launch."""

    name: str
    kernel: str
    grid: tuple[int, ...]
    words: dict[str, Any]
    options: dict[str, Any]


class Drawn:
    """Inputs drawn one after another, and the cases that they are drawn for."""

    def __init__(self, seed: int) -> None:
        self.rng, self.cases = np.random.default_rng(seed), list[Case]()

    def normal(self, *shape: int, dt: Any = F32, by: float = 1.0) -> Any:
        """Return normal numbers times ``by``."""
        return (self.rng.standard_normal(shape) * by).astype(F32).astype(dt)

    def add(self, *case: Any) -> None:
        """Add a case."""
        self.cases.append(Case(*case))


def zeros(*shape: int, dt: Any = F32) -> Any:
    """Return a result."""
    return np.zeros(shape, dt)


def digest(result: Any) -> str:
    """Return the digest of results; every NaN is one."""
    bits = np.where(np.isnan(result.astype(np.float32)), np.nan, result).astype(result.dtype)
    return sha256(bits.tobytes()).hexdigest()[:16]


def digest_of_inputs(case: Case) -> str:
    """Return the digest of all arrays of a launch as they are before it."""
    arrays = [x.tobytes() for x in case.words.values() if isinstance(x, np.ndarray)]
    return sha256(b"".join(arrays)).hexdigest()[:16]


def first() -> list[Case]:
    """Return rows, sums, products and attention."""
    d = Drawn(5)
    for dt, s in FLOATS:
        for w in (4, 8):
            d.add(
                f"gelu_tanh_{s}_{w}",
                "gelu_tanh",
                (9,),
                {"X": d.normal(9000, dt=dt, by=3), "Y": zeros(9000, dt=dt), "n": 9000},
                {"B": 1024, "num_warps": w},
            )
        d.add(
            f"gelu_erf_{s}",
            "gelu_erf",
            (9,),
            {"X": d.normal(9000, dt=dt, by=3), "Y": zeros(9000, dt=dt), "n": 9000},
            {"B": 1024, "num_warps": 4},
        )
        d.add(
            f"silu_mul_{s}",
            "silu_mul",
            (8,),
            {
                "G": d.normal(8, 1500, dt=dt, by=3),
                "U": d.normal(8, 1500, dt=dt),
                "Y": zeros(8, 1500, dt=dt),
                "cols": 1500,
            },
            {"B": 2048, "num_warps": 4},
        )
        d.add(
            f"swiglu_bwd_{s}",
            "swiglu_bwd",
            (8,),
            {
                "DY": d.normal(8, 1500, dt=dt),
                "G": d.normal(8, 1500, dt=dt, by=2),
                "U": d.normal(8, 1500, dt=dt),
                "DG": zeros(8, 1500, dt=dt),
                "DU": zeros(8, 1500, dt=dt),
                "cols": 1500,
            },
            {"B": 2048, "num_warps": 8},
        )
        for c, B, w in ((1000, 1024, 4), (1000, 1024, 8), (333, 512, 1), (4096, 4096, 16), (64, 64, 2)):
            d.add(
                f"softmax_{s}_{c}_{w}",
                "softmax_row",
                (16,),
                {"X": d.normal(16, c, dt=dt, by=3), "Y": zeros(16, c, dt=dt), "cols": c},
                {"B": B, "num_warps": w},
            )
            d.add(
                f"softmax_bwd_{s}_{c}_{w}",
                "softmax_bwd",
                (16,),
                {
                    "P": abs(d.normal(16, c, dt=dt)),
                    "DP": d.normal(16, c, dt=dt),
                    "DX": zeros(16, c, dt=dt),
                    "cols": c,
                    "scale": 0.125,
                },
                {"B": B, "num_warps": w},
            )
            d.add(
                f"layer_norm_{s}_{c}_{w}",
                "layer_norm",
                (16,),
                {
                    "X": d.normal(16, c, dt=dt),
                    "W": d.normal(c, dt=dt),
                    "Bi": d.normal(c, dt=dt),
                    "Y": zeros(16, c, dt=dt),
                    "Mean": zeros(16),
                    "Rstd": zeros(16),
                    "cols": c,
                    "eps": 1e-5,
                },
                {"B": B, "num_warps": w},
            )
            d.add(
                f"add_rms_{s}_{c}_{w}",
                "add_rms",
                (16,),
                {
                    "X": d.normal(16, c, dt=dt),
                    "R": d.normal(16, c, dt=dt),
                    "W": d.normal(c, dt=dt),
                    "Y": zeros(16, c, dt=dt),
                    "S": zeros(16, c, dt=dt),
                    "cols": c,
                    "eps": 1e-6,
                },
                {"B": B, "num_warps": w},
            )
            d.add(
                f"l2norm_{s}_{c}_{w}",
                "l2norm",
                (4,),
                {"X": d.normal(16, c, dt=dt), "Y": zeros(16, c, dt=dt), "cols": c, "eps": 1e-6, "rows": 16},
                {"B": B, "R": 4, "num_warps": w},
            )
        for w in (1, 4, 8):
            d.add(
                f"log_softmax_{s}_{w}",
                "log_softmax_loop",
                (8,),
                {"X": d.normal(8, 3000, dt=dt, by=2), "Y": zeros(8, 3000, dt=dt), "cols": 3000},
                {"B": 1024, "num_warps": w},
            )
            d.add(
                f"online_lse_{s}_{w}",
                "online_lse",
                (8,),
                {"X": d.normal(8, 3000, dt=dt, by=2), "L": zeros(8), "cols": 3000},
                {"B": 1024, "num_warps": w},
            )
            d.add(
                f"kl_{s}_{w}",
                "kl",
                (8,),
                {"P": d.normal(8, 3000, dt=dt), "Q": d.normal(8, 3000, dt=dt), "L": zeros(8), "cols": 3000},
                {"B": 1024, "num_warps": w},
            )
            d.add(
                f"col_sum_{s}_{w}",
                "col_sum",
                (5,),
                {"X": d.normal(100, 300, dt=dt), "Y": zeros(300), "rows": 100, "cols": 300},
                {"BR": 32, "BC": 64, "num_warps": w},
            )
            d.add(
                f"group_norm_{s}_{w}",
                "group_norm",
                (6,),
                {
                    "X": d.normal(24, 200, dt=dt),
                    "W": d.normal(24, dt=dt),
                    "Bi": d.normal(24, dt=dt),
                    "Y": zeros(24, 200, dt=dt),
                    "C": 24,
                    "HW": 200,
                    "eps": 1e-5,
                },
                {"GC": 4, "BH": 128, "num_warps": w},
            )
        d.add(
            f"quant_{s}",
            "quant_group",
            (8, 8),
            {"X": d.normal(8, 1024, dt=dt), "Q": zeros(8, 1024, dt=E4M3), "S": zeros(8, 8), "cols": 1024},
            {"G": 128, "num_warps": 1},
        )
        d.add(
            f"rope_{s}",
            "rope",
            (16, 4),
            {
                "X": d.normal(16, 4, 128, dt=dt),
                "Cos": d.normal(16, 64, dt=dt),
                "Sin": d.normal(16, 64, dt=dt),
                "Y": zeros(16, 4, 128, dt=dt),
                "heads": 4,
            },
            {"H": 64, "num_warps": 4},
        )
        d.add(
            f"merge_{s}",
            "merge",
            (64,),
            {
                "A": d.normal(64, 128, dt=dt),
                "LA": d.normal(64),
                "Bm": d.normal(64, 128, dt=dt),
                "LB": d.normal(64),
                "O": zeros(64, 128, dt=dt),
                "LO": zeros(64),
            },
            {"D": 128, "num_warps": 4},
        )
        for BM, BN, BK, w, st in ((64, 64, 32, 4, 3), (128, 128, 64, 8, 3), (16, 64, 64, 4, 2), (128, 64, 32, 4, 4)):
            for act in (False, True):
                d.add(
                    f"matmul_{s}_{BM}x{BN}x{BK}_{w}_{act}",
                    "matmul",
                    (-(-200 // BM), -(-192 // BN)),
                    {
                        "A": d.normal(200, 320, dt=dt),
                        "Bm": d.normal(320, 192, dt=dt),
                        "C": zeros(200, 192, dt=dt),
                        "M": 200,
                        "N": 192,
                        "K": 320,
                    },
                    {"BM": BM, "BN": BN, "BK": BK, "ACT": act, "num_warps": w, "num_stages": st},
                )
    for w in (1, 4):
        d.add(
            f"cumsum_{w}",
            "cumsum_row",
            (8,),
            {"X": d.normal(8, 500), "Y": zeros(8, 500), "cols": 500},
            {"B": 512, "num_warps": w},
        )
    d.add(
        "unary",
        "unary",
        (9,),
        {
            "X": d.normal(9000, by=8),
            "A": zeros(9000),
            "Bo": zeros(9000),
            "C": zeros(9000),
            "D": zeros(9000),
            "E": zeros(9000),
            "F": zeros(9000),
            "n": 9000,
        },
        {"BL": 1024, "num_warps": 4},
    )
    d.add(
        "unary2",
        "unary2",
        (9,),
        {
            "X": d.normal(9000, by=2),
            "A": zeros(9000),
            "Bo": zeros(9000),
            "C": zeros(9000),
            "D": zeros(9000),
            "E": zeros(9000),
            "n": 9000,
        },
        {"BL": 1024, "num_warps": 4},
    )
    for dt, s in HALVES:
        for D in (64, 128):
            for BM, BN, w, st in ((64, 64, 4, 2), (128, 64, 4, 3), (128, 128, 8, 2), (64, 32, 2, 3)):
                for ca in (False, True):
                    d.add(
                        f"fa_{s}_{D}_{BM}x{BN}_{w}_{ca}",
                        "fa",
                        (-(-300 // BM), 2),
                        {
                            "Q": d.normal(2, 300, D, dt=dt),
                            "K": d.normal(2, 300, D, dt=dt),
                            "V": d.normal(2, 300, D, dt=dt),
                            "O": zeros(2, 300, D, dt=dt),
                            "L": zeros(2, 300),
                            "sc": 0.1803,
                            "S": 300,
                        },
                        {"D": D, "BM": BM, "BN": BN, "CAUSAL": ca, "num_warps": w, "num_stages": st},
                    )
    for BM, BN, BK, w in ((64, 64, 64, 4), (128, 128, 128, 8)):
        d.add(
            f"matmul_f8_{BM}",
            "matmul",
            (-(-200 // BM), -(-192 // BN)),
            {
                "A": d.normal(200, 320, dt=E4M3),
                "Bm": d.normal(320, 192, dt=E4M3),
                "C": zeros(200, 192),
                "M": 200,
                "N": 192,
                "K": 320,
            },
            {"BM": BM, "BN": BN, "BK": BK, "ACT": False, "num_warps": w, "num_stages": 3},
        )
    return d.cases


def second() -> list[Case]:
    """Return backward passes, decoding, losses, recurrences and casts."""
    d = Drawn(7)
    for dt, s in HALVES:
        for D, w in ((64, 4), (128, 8)):
            d.add(
                f"bwd_pre_{s}_{D}",
                "bwd_pre",
                (4, 2),
                {"O": d.normal(2, 256, D, dt=dt), "DO": d.normal(2, 256, D, dt=dt), "Delta": zeros(2, 256), "S": 256},
                {"D": D, "BM": 64, "num_warps": w},
            )
            for BM, BN in ((64, 64), (128, 32)):
                t = {
                    "Q": d.normal(2, 256, D, dt=dt),
                    "K": d.normal(2, 256, D, dt=dt),
                    "V": d.normal(2, 256, D, dt=dt),
                    "DO": d.normal(2, 256, D, dt=dt),
                    "L": abs(d.normal(2, 256)) + 8,
                    "Delta": d.normal(2, 256),
                }
                d.add(
                    f"attn_dq_{s}_{D}_{BM}x{BN}",
                    "attn_dq",
                    (256 // BM, 2),
                    dict(**t, DQ=zeros(2, 256, D), sc=0.18, S=256),
                    {"D": D, "BM": BM, "BN": BN, "num_warps": w, "num_stages": 2},
                )
                d.add(
                    f"attn_dkv_{s}_{D}_{BM}x{BN}",
                    "attn_dkv",
                    (256 // BN, 2),
                    dict(**t, DK=zeros(2, 256, D), DV=zeros(2, 256, D), sc=0.18, S=256),
                    {"D": D, "BM": BM, "BN": BN, "num_warps": w, "num_stages": 2},
                )
            d.add(
                f"decode1_{s}_{D}",
                "decode1",
                (2, 4),
                {
                    "Q": d.normal(32, D, dt=dt),
                    "K": d.normal(2, 500, D, dt=dt),
                    "V": d.normal(2, 500, D, dt=dt),
                    "O": zeros(32, 4, D),
                    "L": zeros(32, 4),
                    "sc": 0.125,
                    "S": 500,
                    "CH": 128,
                },
                {"D": D, "G": 16, "BN": 32 if D == 128 else 64, "num_warps": w, "num_stages": 2},
            )
            d.add(
                f"paged_{s}_{D}",
                "paged",
                (3, 2),
                {
                    "Q": d.normal(3, 2, 16, D, dt=dt),
                    "K": d.normal(20, 32, 2, D, dt=dt),
                    "V": d.normal(20, 32, 2, D, dt=dt),
                    "BT": d.rng.permutation(20)[:18].reshape(3, 6).astype(I32),
                    "Len": np.array([150, 32, 99], I32),
                    "O": zeros(3, 2, 16, D, dt=dt),
                    "sc": 0.125,
                    "MAXB": 6,
                },
                {"D": D, "G": 16, "P": 32, "num_warps": w, "num_stages": 2},
            )
        for how in (0, 1, 2):
            d.add(
                f"attn_extra{how}_{s}",
                "attn_extra",
                (4, 2),
                {
                    "Q": d.normal(2, 256, 64, dt=dt),
                    "K": d.normal(2, 256, 64, dt=dt),
                    "V": d.normal(2, 256, 64, dt=dt),
                    "O": zeros(2, 256, 64, dt=dt),
                    "sc": 0.125,
                    "S": 256,
                    "cap": 20.0,
                    "W": 100,
                    "slope": 0.05,
                },
                {"D": 64, "BM": 64, "BN": 64, "HOW": how, "num_warps": 4, "num_stages": 2},
            )
        for BM, BN, BK, w in ((64, 64, 64, 4), (128, 128, 32, 8)):
            a = {"A": d.normal(256, 256, dt=dt), "B": d.normal(256, 128, dt=dt)}
            d.add(
                f"mm_bias_gelu_{s}_{BM}",
                "mm_bias_gelu",
                (256 // BM, 128 // BN),
                dict(**a, Bias=d.normal(128, dt=dt), C=zeros(256, 128, dt=dt), M=256, N=128, K=256),
                {"BM": BM, "BN": BN, "BK": BK, "num_warps": w, "num_stages": 3},
            )
            d.add(
                f"mm_swiglu_{s}_{BM}",
                "mm_swiglu",
                (256 // BM, 128 // BN),
                {
                    "A": d.normal(256, 256, dt=dt),
                    "W1": d.normal(256, 128, dt=dt, by=0.2),
                    "W2": d.normal(256, 128, dt=dt),
                    "C": zeros(256, 128, dt=dt),
                    "M": 256,
                    "N": 128,
                    "K": 256,
                },
                {"BM": BM, "BN": BN, "BK": BK, "num_warps": w, "num_stages": 3},
            )
            d.add(
                f"bmm_t_{s}_{BM}",
                "bmm_t",
                (256 // BM, 128 // BN, 2),
                {
                    "A": d.normal(2, 256, 256, dt=dt),
                    "B": d.normal(2, 128, 256, dt=dt),
                    "C": zeros(2, 256, 128),
                    "M": 256,
                    "N": 128,
                    "K": 256,
                },
                {"BM": BM, "BN": BN, "BK": BK, "num_warps": w, "num_stages": 3},
            )
        d.add(
            f"lin_attn_{s}",
            "lin_attn",
            (2,),
            {
                "Q": d.normal(2, 256, 64, dt=dt, by=0.2),
                "K": d.normal(2, 256, 64, dt=dt, by=0.2),
                "V": d.normal(2, 256, 64, dt=dt),
                "O": zeros(2, 256, 64),
                "S": 256,
            },
            {"D": 64, "BM": 64, "num_warps": 4, "num_stages": 1},
        )
        d.add(
            f"half_math_{s}",
            "half_math",
            (4,),
            {"X": d.normal(4000, dt=dt), "Y": d.normal(4000, dt=dt), "Z": zeros(4000, dt=dt), "n": 4000},
            {"BL": 1024, "num_warps": 4},
        )
    d.add(
        "mm_half_acc",
        "mm_half_acc",
        (4, 2),
        {
            "A": d.normal(256, 256, dt=F16, by=0.3),
            "B": d.normal(256, 128, dt=F16, by=0.3),
            "C": zeros(256, 128, dt=F16),
            "M": 256,
            "N": 128,
            "K": 256,
        },
        {"BM": 64, "BN": 64, "BK": 64, "num_warps": 4, "num_stages": 3},
    )
    d.add(
        "mm_scaled",
        "mm_scaled",
        (4, 1),
        {
            "A": d.normal(256, 512, dt=E4M3),
            "B": d.normal(128, 512, dt=E4M3),
            "As": abs(d.normal(256, 4)) + 0.1,
            "Bs": abs(d.normal(1, 4)) + 0.1,
            "C": zeros(256, 128, dt=BF16),
            "M": 256,
            "N": 128,
            "K": 512,
        },
        {"BM": 64, "BN": 128, "BK": 128, "num_warps": 4, "num_stages": 3},
    )
    for dt, s in FLOATS:
        for c, B, w in ((1000, 1024, 4), (2048, 2048, 8), (333, 512, 2)):
            d.add(
                f"ln_bwd_{s}_{c}",
                "ln_bwd",
                (8,),
                {
                    "DY": d.normal(8, c, dt=dt),
                    "X": d.normal(8, c, dt=dt),
                    "W": d.normal(c, dt=dt),
                    "Mean": d.normal(8, by=0.1),
                    "Rstd": abs(d.normal(8)) + 0.5,
                    "DX": zeros(8, c, dt=dt),
                    "cols": c,
                },
                {"B": B, "num_warps": w},
            )
            d.add(
                f"rms_bwd_{s}_{c}",
                "rms_bwd",
                (8,),
                {
                    "DY": d.normal(8, c, dt=dt),
                    "X": d.normal(8, c, dt=dt),
                    "W": d.normal(c, dt=dt),
                    "R": abs(d.normal(8)) + 0.5,
                    "DX": zeros(8, c, dt=dt),
                    "cols": c,
                },
                {"B": B, "num_warps": w},
            )
            d.add(
                f"ce_fwd_{s}_{c}",
                "ce_fwd",
                (8,),
                {
                    "X": d.normal(8, c, dt=dt, by=3),
                    "T": d.rng.integers(0, c, 8).astype(I32),
                    "Loss": zeros(8),
                    "cols": c,
                },
                {"B": 256, "num_warps": w},
            )
            d.add(
                f"embed_{s}_{c}",
                "embed",
                (8,),
                {
                    "T": d.rng.integers(0, 20, 8).astype(I32),
                    "W": d.normal(20, c, dt=dt),
                    "Y": zeros(8, c, dt=dt),
                    "cols": c,
                },
                {"B": B, "num_warps": w},
            )
        for R, B, w in ((4, 512, 4), (16, 128, 8), (2, 256, 1)):
            c = B - 13
            d.add(
                f"rows2d_{s}_{R}x{B}",
                "rows2d",
                (-(-20 // R),),
                {"X": d.normal(20, c, dt=dt), "W": d.normal(c, dt=dt), "Y": zeros(20, c, dt=dt), "rows": 20, "cols": c},
                {"R": R, "B": B, "num_warps": w},
            )
        d.add(
            f"rope_gptj_{s}",
            "rope_gptj",
            (16,),
            {
                "X": d.normal(16, 128, dt=dt),
                "Cos": d.normal(16, 64, dt=dt),
                "Sin": d.normal(16, 64, dt=dt),
                "Y": zeros(16, 128, dt=dt),
            },
            {"H": 64, "num_warps": 2},
        )
        d.add(
            f"ema_{s}",
            "ema",
            (3,),
            {"X": d.normal(50, 384, dt=dt), "A": d.normal(50, 384, dt=dt), "Y": zeros(50, 384), "T": 50, "C": 384},
            {"B": 128, "num_warps": 4},
        )
        d.add(
            f"acts_{s}",
            "acts",
            (4,),
            {
                "X": d.normal(4000, dt=dt, by=3),
                "A": zeros(4000),
                "Bo": zeros(4000),
                "C": zeros(4000),
                "D": zeros(4000),
                "E": zeros(4000),
                "F": zeros(4000),
                "n": 4000,
            },
            {"BL": 1024, "num_warps": 4},
        )
        for w in (1, 4):
            d.add(
                f"loss_{s}_{w}",
                "loss_parts",
                (4,),
                {
                    "X": d.normal(4000, dt=dt),
                    "Y": d.normal(4000, dt=dt),
                    "A": zeros(4),
                    "Bo": zeros(4),
                    "C": zeros(4),
                    "n": 4000,
                },
                {"BL": 1024, "num_warps": w},
            )
        d.add(
            f"conv1d_{s}",
            "conv1d",
            (20, 3),
            {
                "X": d.normal(20, 384, dt=dt),
                "W": d.normal(4, 384, dt=dt),
                "Bi": d.normal(384, dt=dt),
                "Y": zeros(20, 384),
                "T": 20,
                "C": 384,
            },
            {"B": 128, "num_warps": 4},
        )
    d.add(
        "adamw",
        "adamw",
        (4,),
        {
            "P": d.normal(4000),
            "G": d.normal(4000, by=0.1),
            "M": d.normal(4000, by=0.1),
            "V": abs(d.normal(4000, by=0.01)),
            "PO": zeros(4000),
            "MO": zeros(4000),
            "VO": zeros(4000),
            "lr": 1e-3,
            "b1": 0.9,
            "b2": 0.999,
            "eps": 1e-8,
            "wd": 0.01,
            "c1": 0.1,
            "c2": 0.001,
            "n": 4000,
        },
        {"BL": 1024, "num_warps": 4},
    )
    d.add(
        "casts",
        "casts",
        (4,),
        {
            "X": d.normal(4000, by=30),
            "A": zeros(4000),
            "Bo": zeros(4000),
            "C": zeros(4000, dt=E4M3),
            "D": zeros(4000, dt=E5M2),
            "n": 4000,
        },
        {"BL": 1024, "num_warps": 4},
    )
    for D in (64, 128):
        d.add(
            f"decode2_{D}",
            "decode2",
            (16,),
            {"P": d.normal(16, 5, D), "L": d.normal(16, 5), "O": zeros(16, D, dt=F16), "NC": 5},
            {"D": D, "num_warps": 4},
        )
    return d.cases


def third() -> list[Case]:
    """Return products of other precisions, peeled loops, lanes by masks, elements by index, sums along both axes."""
    d = Drawn(7)
    for m, n, k, bm, bn, bk, w in (
        (32, 64, 96, 16, 32, 32, 4),
        (64, 64, 128, 64, 64, 32, 4),
        (128, 32, 64, 64, 16, 16, 8),
    ):
        for by in ("ieee", "tf32"):
            words = {"A": d.normal(m, k), "B": d.normal(k, n), "C": zeros(m, n), "M": m, "N": n, "K": k}
            options = {"PRECISION": by, "BM": bm, "BN": bn, "BK": bk, "num_warps": w}
            d.add(f"mm_{by}_{m}x{n}x{k}", "mm_by", (m // bm, n // bn), words, options)
    for dt, s in ((E4M3, "e4m3"), (E5M2, "e5m2")):
        for m in (16, 64, 128):
            for most in (0, 32, 64, 128):
                a, b = d.normal(m, 512, dt=dt, by=4), d.normal(64, 512, dt=dt, by=4)
                options = {"MOST": most, "M": m, "N": 64, "BK": 128, "num_warps": 4}
                d.add(f"mm_fp8_{s}_{m}_{most}", "mm_fp8", (1,), {"A": a, "B": b, "C": zeros(m, 64), "K": 512}, options)
    for n, b, w in ((1500, 512, 4), (1024, 256, 4), (700, 512, 8)):
        words = {"X": d.normal(6, n), "Y": zeros(6, n), "n": n, "HIDES": 0}
        options = {"OTHER": -float("inf"), "SCALE": 1.0, "B": b, "num_warps": w}
        d.add(f"peeled_softmax_{n}_{b}", "peeled_softmax", (6,), words, options)
        d.add(
            f"counted_mean_{n}_{b}",
            "counted_mean",
            (6,),
            {"X": d.normal(6, n), "MEAN": zeros(6), "n": n},
            {"B": b, "num_warps": w},
        )
        for dt, s in FLOATS:
            words = {"X": d.normal(6, n, dt=dt), "W": d.normal(n, dt=dt), "Bi": d.normal(n, dt=dt)}
            words |= {"Y": zeros(6, n, dt=dt), "MEAN": zeros(6), "n": n}
            d.add(f"peeled_norm_{s}_{n}_{b}", "peeled_norm", (6,), words, {"B": b, "num_warps": w})
    for n, b in ((100, 32), (64, 64)):
        x = np.round(d.normal(12, n, by=2))
        words = {"X": x, "Y": zeros(12, dt=np.int64), "rows": 12, "n": n}
        d.add(f"running_place_{n}_{b}", "running_place", (3,), words, {"R": 4, "B": b, "num_warps": 4})
    labels = d.rng.integers(0, 77, 40)
    words = {"X": d.normal(40, 77), "L": np.where(labels < 9, -100, labels), "W": d.normal(77), "Y": zeros(40), "n": 40}
    d.add("label_losses", "label_losses", (3,), {**words, "C": 77, "IGNORED": -100}, {"B": 16, "num_warps": 4})
    words = {"X": d.normal(40, 77), "L": labels, "Y": zeros(40, 77), "n": 40, "C": 77}
    d.add("label_gradients", "label_gradients", (10,), words, {"R": 4, "B": 128, "num_warps": 4})
    for size, b in ((64, 512), (128, 1024)):
        words = {name: d.normal(20, size) for name in "XCS"} | {"Y": zeros(20, size), "n": 20 * size}
        d.add(f"rotated_{size}", "rotated", (-(-20 * size // b),), words, {"D": size, "B": b, "num_warps": 4})
    for dt, s in FLOATS:
        words = {
            "X": d.normal(20, 128, dt=dt),
            "C": d.normal(20, 64),
            "S": d.normal(20, 64),
            "Y": zeros(20, 128, dt=dt),
        }
        d.add(f"rope_pairs_{s}", "rope_pairs", (20,), words, {"D": 128, "num_warps": 4})
        for rows, cols, r, b, w in ((4, 250, 4, 256, 4), (8, 64, 8, 64, 4), (3, 1000, 4, 1024, 8)):
            words = {"X": d.normal(5, rows * cols, dt=dt), "Y": zeros(5, rows * cols, dt=dt), "V": zeros(5)}
            options = {"R": r, "B": b, "num_warps": w}
            d.add(f"both_axes_{s}_{rows}x{cols}", "both_axes", (5,), {**words, "rows": rows, "cols": cols}, options)
    return d.cases
