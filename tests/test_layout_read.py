"""Tensors whose heads and tokens are likelier exchanged: every verb states how it read them, and names --layout."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from typer.testing import CliRunner

import npusim
from npusim.cli.app import app
from npusim.errors import TensorError

if TYPE_CHECKING:
    from pathlib import Path

READ = (
    "tensors: interpreted as 64 heads of 4 keys (layout bnsd: batch, heads, tokens, "
    "head size); with --layout bsnd they "
)
SIZES = {"q": (1, 64, 8, 16), "k": (1, 64, 4, 16), "v": (1, 64, 4, 16)}


def tensors(sizes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {n: rng.standard_normal(shape).astype(np.float16) for n, shape in sizes.items()}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return a file of 64 tokens of 8 and 4 heads, in the order of most frameworks."""
    np.savez(tmp_path / "qkv.npz", **tensors(SIZES))
    return tmp_path / "qkv.npz"


def shown(*words: str) -> str:
    result = CliRunner().invoke(app, [*words])
    assert result.exit_code in (0, 1), result.output
    return " ".join(result.stdout.split())


def test_a_run_says_how_it_read_them_and_names_the_option(file: Path) -> None:
    call = ("run", "flash", "--tensors", str(file), "--no-causal", "--no-save")
    assert f"{READ}have 8 heads of 64 keys" in shown(*call)
    assert "read as" not in shown(*call, "--layout", "bsnd")


def test_diff_judge_and_stress_say_it_too(file: Path) -> None:
    call = ("flash", "--tensors", str(file), "--no-causal")
    out = npusim.run("flash", tensors=str(file), causal=False, rows="all", heads="all").output
    np.savez(file.parent / "out.npz", o=out)
    diff = ("diff", str(file.parent / "out.npz"), *call)
    assert READ in shown(*diff)
    assert READ in shown(*diff, "--judge")
    worst = ("-o", str(file.parent / "worst.safetensors"))
    assert READ in shown("stress", *call, "--over", "logit_std=0.5:1", "--budget", "1", *worst)


@pytest.mark.parametrize(
    "sizes",
    [
        {"q": (1, 8, 64, 16), "k": (1, 4, 64, 16), "v": (1, 4, 64, 16)},  # fewer heads than keys
        {"q": (1, 8, 1, 16), "k": (1, 8, 8, 16), "v": (1, 8, 8, 16)},  # as many
        {"q": (1, 16, 3, 16), "k": (1, 16, 8, 16), "v": (1, 16, 8, 16)},  # exchanged they are no attention
    ],
)
def test_a_likely_reading_needs_no_words(sizes: dict[str, tuple[int, ...]]) -> None:
    run = npusim.run("flash", tensors=tensors(sizes), causal=False, numerics=False)
    assert not [note for note in run.notes if "read as" in note]


def test_errors_of_shapes_name_the_layout() -> None:
    exchanged = tensors({"q": (1, 6, 8, 16), "k": (1, 64, 4, 16), "v": (1, 64, 4, 16)})
    with pytest.raises(TensorError, match=r"with layout bnsd, \(batch, heads, tokens, head size\), do not match"):
        npusim.run("flash", tensors=exchanged)
    wide = tensors({n: (*shape[:3], 128) for n, shape in SIZES.items()})
    with pytest.raises(
        TensorError, match=r"64 query heads of 128 .*; tensors: interpreted as 64 heads .* --layout bsnd"
    ):
        npusim.run("flash", workload="llama3_8b", tensors=wide)
