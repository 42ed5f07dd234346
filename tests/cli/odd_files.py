"""Files that are wrong in one way each, for commands that must say so."""

from __future__ import annotations

import json
import zipfile
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["write_odd_files"]

WORKLOAD = (
    "schema: npusim.workload/1\nname: w\ndescription: d\nsource: s\nheads: 2\nhead_dim: 64\nseq: 64\ncausal: false\n"
)
BASELINE = "schema: npusim.baseline/1\nschedule: flash\nhw: ascend_910b2\nworkload: pangu_38b\nseq: 256\n"
MEASURED = (
    "schema: npusim.measurements/1\nsource: s\nband: 0.1\ncases:\n"
    "  - {name: a, hw: ascend_910b2, schedule: gemm, workload: {m: 64, n: 64, k: 64}, measured: {latency_us: 1000}}\n"
)
CONFIG = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1}


def write_odd_files(folder: Path) -> None:
    """Write them all; the names say what is wrong, or nothing is (``ok``, ``w``, ``config``)."""
    _texts(folder)
    _archives(folder)
    for name in ("mine", "nothing", "folder.yaml", "folder.npz", "folder.py"):
        (folder / name).mkdir()
    (folder / "mine" / "thesis.tex").write_text("")
    (folder / "file").write_text("")
    (folder / "binary.yaml").write_bytes(b"\x89PNG\r\n\x1a\n\x00\xff\xfe")
    (folder / "short.safetensors").write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00{")


def _texts(folder: Path) -> None:
    texts = {
        "empty.yaml": "",
        "list.yaml": "- 1\n",
        "hex.yaml": WORKLOAD.replace("seq: 64", f"seq: 0x{'f' * 6000}"),
        "twice.yaml": "name: a\nname: b\n",
        "unknown_key.yaml": WORKLOAD + "head: 3\n",
        "device.yaml": "schema: npusim.device/1\nname: x\n",
        "evil_name.yaml": WORKLOAD.replace("name: w", "name: ../../x"),
        "w.yaml": WORKLOAD,
        "heads.yaml": WORKLOAD + "kv_heads: 3\n",
        "tabs.yaml": "a: 1\n\tb: 2\n",
        "tag.yaml": "a: !python/none 1\n",
        "anchors.yaml": "a: *gone\n",
        "loop.yaml": "extends: loop.yaml\n",
        "negative.yaml": "extends: ascend_910b2\nclock_hz: {value: -3, basis: assumed, source: s}\n",
        "base_new.yaml": BASELINE,
        "base_schema.yaml": BASELINE.replace("baseline/1", "baseline/9"),
        "base_words.yaml": BASELINE + "tilings: {block_kv: 3}\n",
        "measured.yaml": MEASURED,
        "odd_cases.yaml": MEASURED.replace("k: 64", "k: 64, dtype: float17"),
        "empty_cases.yaml": MEASURED.partition("  - ")[0] + "  []\n",
        "text.txt": "hello\n",
        "json_list.json": "[]\n",
        "deep.json": "[" * 100_000,
        "half.json": json.dumps({"hidden_size": 64}),
        "config.json": json.dumps(CONFIG),
        "old.json": json.dumps({"kind": "npusim.run", "schema_version": 0}),
    }
    for name, text in texts.items():
        (folder / name).write_text(text)


def _archives(folder: Path) -> None:
    def save(name: str, **changes: object) -> None:
        tensors = {n: np.ones((1, 1, 64, 16), "float16") for n in "qkv"}
        tensors.update({n: np.asarray(values) for n, values in changes.items()})
        np.savez(folder / name, **tensors)  # type: ignore[arg-type]

    save("ok.npz")
    save("shape.npz", k=np.ones((1, 1, 63, 16), "float16"))
    save("pickle.npz", k=np.array([{}], object))
    save("f32.npz", **{n: np.ones((1, 1, 64, 16), "float32") for n in "qkv"})
    rng = np.random.default_rng(0)
    save("wide.npz", **{n: rng.standard_normal((1, 1, 128, 256), np.float32) for n in "qkv"})
    save("none_of_it.npz", **{n: np.ones((1, 0, 64, 16), "float16") for n in "qkv"})
    save("bf16.npz", **{n: np.ones((1, 1, 64, 16), "V2") for n in "qkv"})  # what numpy makes of bfloat16
    save("e4m3.npz", **{n: np.ones((1, 1, 64, 16), "V1") for n in "qkv"})
    save("int.npz", **{n: np.ones((1, 1, 64, 16), "int32") for n in "qkv"})
    save("nan.npz", v=np.full((1, 1, 64, 16), np.nan, "float16"))
    np.savez(folder / "keys.npz", a=np.ones(3))
    (folder / "short.npz").write_bytes((folder / "ok.npz").read_bytes()[:300])
    with zipfile.ZipFile(folder / "huge.npz", "w") as archive, archive.open("q.npy", "w") as member:
        header = {"descr": "<f2", "fortran_order": False, "shape": (1, 1, 1 << 27, 128)}
        np.lib.format.write_array_header_1_0(member, header)
