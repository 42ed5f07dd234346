"""Launches in the forms of Triton's tutorials 01, 02, 03, 05, 06 and 09, at small sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ttir.drawn import Case

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def _normal(seed: int, *shape: int, fmt: str = "float16") -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(fmt)


def add() -> Case:
    x, y = _normal(0, 1000, fmt="float32"), _normal(1, 1000, fmt="float32")
    return Case("add", lambda a: (-(-1000 // a["B"]),), {"X": x, "Y": y, "Z": np.zeros_like(x), "n": 1000}, {}, "Z")


def softmax() -> Case:
    x = _normal(0, 40, 100, fmt="float32")
    words = {"Y": np.zeros_like(x), "X": x, "sy": 100, "sx": 100, "rows": 40, "columns": 100, "B": 128}
    return Case("softmax_rows", (8,), {**words, "num_stages": 2}, {"num_warps": 4}, "Y")


def product() -> Case:
    a, b, c = _normal(0, 128, 96), _normal(1, 96, 128), np.zeros((128, 128), np.float16)
    words = {"A": a, "B": b, "C": c, "Bias": None, "M": 128, "N": 128, "K": 96, "am": 96, "ak": 1, "bk": 128, "bn": 1}
    blocks = {"cm": 128, "cn": 1, "BM": 64, "BN": 64, "BK": 32, "GROUP": 2, "ACT": "leaky"}
    return Case("product", (4,), words | blocks, {"num_warps": 4}, "C")


def layer_norm() -> Case:
    x, w, b = _normal(0, 32, 200), _normal(1, 200), _normal(2, 200)
    mean, rstd = np.zeros(32, np.float32), np.zeros(32, np.float32)
    words = {"X": x, "Y": np.zeros_like(x), "W": w, "B": b, "Mean": mean, "Rstd": rstd, "stride": 200, "N": 200}
    return Case("layer_norm", (32,), {**words, "eps": 1e-5, "BLOCK": 128}, {"num_warps": 4}, "Y")


def _attention(causal: bool) -> Case:
    q, k, v = (_normal(i, 1, 2, 256, 64) for i in range(3))
    words = {"Q": q, "K": k, "V": v, "O": np.zeros_like(q), "L": np.zeros((2, 256), np.float32), "scale": 0.125}
    words |= {"Z": 1, "H": 2, "S": 256, "D": 64, "BM": 64, "BN": 32, "CAUSAL": causal}
    return Case("attention", (4, 2), words, {"num_warps": 4}, "O")


def persistent() -> Case:
    a, b, c = _normal(0, 120, 80), _normal(1, 80, 100), np.zeros((120, 100), np.float16)
    words = {"A": a, "B": b, "C": c, "M": 120, "N": 100, "K": 80, "BM": 64, "BN": 32, "BK": 32, "SMS": 3}
    return Case("persistent_product", (3,), words, {"num_warps": 4}, "C")


def descriptors() -> Case:
    a, b, c = _normal(0, 128, 128), _normal(1, 128, 128), np.zeros((128, 128), np.float16)
    words = {"A": a, "B": b, "C": c, "M": 128, "N": 128, "K": 128, "BM": 64, "BN": 64, "BK": 64}
    return Case("descriptor_product", (2, 2), words, {"num_warps": 4}, "C")


TUTORIALS: Mapping[str, Callable[[], Case]] = {
    "01": add,
    "02": softmax,
    "03": product,
    "05": layer_norm,
    "06": lambda: _attention(causal=False),
    "06 causal": lambda: _attention(causal=True),
    "09": persistent,
    "09 descriptors": descriptors,
}
