"""Which tiles and shapes `measure_h200.py` times."""

from __future__ import annotations

import itertools

STAGES_WARPS = ((1, 4), (2, 4), (3, 8))
TILES = tuple((q, kv, *sw) for q, kv, sw in itertools.product((32, 64, 128, 256), (16, 32, 64, 128, 256), STAGES_WARPS))
NARROW = tuple((q, kv, *sw) for q, kv, sw in itertools.product((64, 128), (32, 64, 128), STAGES_WARPS))
COLUMNS = (
    64,
    128,
    256,
    512,
    768,
    1000,
    1024,
    1032,
    1280,
    1536,
    2048,
    2056,
    2560,
    3000,
    3072,
    3584,
    4096,
    4100,
    5120,
    5676,
    6144,
    7168,
    8192,
    8200,
    9216,
    10240,
    12288,
    14336,
    16384,
    24576,
    32768,
)
#: (heads, length, head size) of unfused attention.
UNFUSED = (
    (1, 1024, 128),
    (16, 1024, 128),
    (64, 1024, 64),
    (16, 2048, 128),
    (128, 2048, 128),
    (5, 4096, 128),
    (32, 4096, 64),
    (256, 512, 64),
    (1024, 512, 64),
    (28, 5676, 128),
    (4, 8192, 128),
    (32, 8192, 128),
    (5, 16384, 128),
    (40, 3000, 128),
    (16, 768, 96),
    (64, 256, 128),
    (40, 1500, 128),
    (40, 1500, 64),
    (16, 2044, 128),
    (8, 5676, 64),
    (8, 4095, 128),
    (64, 1000, 128),
    (12, 3072, 128),
    (24, 6144, 64),
    (48, 1536, 128),
    (8, 2048, 256),
    (32, 512, 128),
    (8, 512, 64),
)
SPLITS = tuple((n, kv, st, w) for n in (1, 2, 4, 8, 16, 32) for kv, st, w in ((64, 2, 4), (128, 3, 4)))


def resident_list() -> list[tuple[str, int, tuple[int, ...]]]:
    eight = ((64, 64, 1, 8), (64, 64, 2, 8), (128, 64, 1, 8), (128, 64, 2, 8), (128, 128, 1, 8), (64, 256, 2, 4))
    small = tuple(t for t in TILES if t[0] == 32 and t[1] <= 128)
    some = (*small, *(t for t in NARROW if t[1] >= 64))
    return [
        *(("fp8_chained", 128, t) for t in (*NARROW, *eight)),
        *(("fp8_fresh", 128, t) for t in (*NARROW, *eight)),
        *(("products", 128, t) for t in some),
        *(("exp", 128, t) for t in some),
        *(("reduce", 128, t) for t in some),
    ]


def cases() -> list[tuple[str, dict]]:
    """Return (kind, shape and tile) of shapes of the kinds given, none of them given."""
    wide = [t for t in TILES if t[1] <= 128 or t[0] in (64, 128)]
    full = dict(causal=False, half=True)
    found: list[tuple[str, dict]] = []
    for group, shape, tiles in (
        ("tiles_b2h12s3072d128_causal", dict(b=2, h=12, hk=12, s=3072, d=128, causal=True, half=True), wide),
        ("tiles_b3h16s1536d128", dict(b=3, h=16, hk=16, s=1536, d=128, **full), wide),
        ("tiles_b1h24s6144d64", dict(b=1, h=24, hk=24, s=6144, d=64, **full), wide),
        ("gqa_b4h32kv8s2048d128", dict(b=4, h=32, hk=8, s=2048, d=128, causal=False), NARROW),
    ):
        found += [("fa", dict(group=group, **shape, **tile(t))) for t in tiles]
    for fresh in (False, True):
        shape = dict(b=2, h=24, s=1536, d=128, fresh=fresh)
        name = f"fp8_b2h24s1536d128_{'fresh' if fresh else 'chained'}"
        found += [("fp8", dict(group=name, **shape, **tile(t))) for t in NARROW if t[1] >= 64 or not fresh]
    shape = dict(b=2, h=20, hk=20, s=3072, d=128)
    found += [("pasa", dict(group="pasa_b2h20s3072d128", **shape, **tile(t))) for t in NARROW if t[1] >= 64]
    shape = dict(b=2, hk=4, g=8, s=16384, d=128)
    found += [
        ("split", dict(group="decode_b2kv4g8s16384d128", **shape, n=n, bn=kv, st=st, nw=w)) for n, kv, st, w in SPLITS
    ]
    return found


def tile(t: tuple[int, ...]) -> dict:
    return dict(zip(("bm", "bn", "st", "nw"), t, strict=True))


def library_cases() -> list[tuple[str, dict]]:
    flash = (
        (2, 8, 1024, 128),
        (4, 12, 3072, 128),
        (1, 40, 6144, 128),
        (16, 16, 1024, 64),
        (64, 16, 512, 64),
        (2, 24, 8192, 64),
    )
    gemm = (
        (1536, 1536, 1536),
        (3072, 3072, 3072),
        (6144, 6144, 6144),
        (8192, 8192, 128),
        (64, 8192, 8192),
        (32768, 256, 256),
        (2048, 5120, 1280),
        (256, 12288, 4096),
    )
    return [
        *(("torch_flash", dict(b=b, h=h, s=s, d=d, causal=c)) for b, h, s, d in flash for c in (False, True)),
        *(("gemm", dict(m=m, n=n, k=k)) for m, n, k in gemm),
        *(("copy", dict(bytes=n << 20)) for n in (2, 8, 32, 48, 128, 512, 2048)),
    ]


def production_cases() -> list[dict]:
    """Return shapes of `measure_h200.production`, none of them given."""
    cudnn = (
        *((1, 8, 8, 2048, 128), (4, 32, 32, 1024, 128), (1, 40, 40, 4096, 128), (2, 32, 8, 8192, 128)),
        *((16, 12, 12, 768, 64), (1, 16, 16, 32768, 64), (4, 64, 8, 3000, 128), (1, 24, 24, 6144, 64)),
        *((3, 10, 10, 1500, 128), (1, 28, 4, 7777, 128), (64, 8, 8, 256, 64), (1, 5, 5, 8192, 128)),
        *((1, 64, 64, 1024, 128), (2, 24, 24, 4096, 64), (1, 32, 8, 32768, 128)),
        *((8, 16, 16, 2048, 96), (1, 16, 16, 8192, 96), (4, 8, 8, 2048, 256), (1, 8, 8, 8192, 256)),
    )
    few = ((1, 8, 1024, 128), (2, 4, 2048, 64), (1, 16, 512, 128), (1, 6, 3072, 128), (1, 2, 8192, 128))
    decode = (
        *((4, 32, 32, 8192, 128), (16, 32, 32, 2048, 128), (1, 8, 8, 65536, 128)),
        *((4, 32, 8, 8192, 128), (2, 16, 16, 16384, 64), (64, 8, 8, 1024, 128)),
    )

    def case(kernel: str, shape: tuple[int, ...], rows: int, *, causal: bool) -> dict:
        names = zip(("b", "h", "hk", "s", "d"), shape, strict=True)
        dtype = "float16" if shape[1] == shape[2] else "bfloat16"
        return dict(names, kernel=kernel, rows=rows, causal=causal, dtype=dtype)

    return [
        *(case("cudnn", shape, shape[3], causal=c) for shape in cudnn for c in (False, True)),
        *(case("fa2", (b, h, h, s, d), s, causal=c) for b, h, s, d in few for c in (False, True)),
        *(case("fa2", shape, 1, causal=False) for shape in decode),
    ]
