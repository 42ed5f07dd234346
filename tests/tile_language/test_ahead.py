"""Kernels of TileLang-Ascend that work ahead, against their text run as Python in float64; changed ones are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import npusim
from npusim.errors import NpusimError
from npusim.kernels.tilelang.ascend_recording import program_call
from npusim.kernels.tilelang.ascend_text import kernel_of
from npusim.kernels.tilelang.program import Language, load_program
from npusim.kernels.tilelang.statements import TileBuffer
from tests.tile_language.eager import executed
from tests.tile_language.test_developer import computed, distance, drawn

PROGRAMS = Path(__file__).with_name("ahead_programs.py")
CLOSE, EXACT = 1e-3, 1e-5


def both(name: str, **arguments: Any) -> tuple[Any, Any]:
    """Return the first output of a kernel as npusim reads it, and as its text runs in float64."""
    language = Language()
    kernel = load_program(PROGRAMS, name, arguments, language)
    read = kernel_of(kernel, language)
    outputs = kernel.output_names | kernel.workspace_names
    tensors = [p for p in read.parameters if isinstance(p, TileBuffer) and p.name not in outputs]
    given = {p.name: drawn(*p.shape, seed=i, fmt=p.fmt) for i, p in enumerate(tensors)}
    (output,) = kernel.output_names
    return computed(read, **given)[output], executed(kernel, language, given)[output]


@pytest.mark.parametrize(
    ("name", "arguments", "close"),
    [
        ("copied_ahead", {}, EXACT),
        ("copied_ahead", {"slots": 3}, EXACT),
        ("striding", {"rows": 200}, EXACT),
        ("striding", {"rows": 64}, EXACT),
        ("striding", {"rows": 200, "stride": 5}, EXACT),  # some blocks twice: a loop of each core
        ("product_ahead", {}, CLOSE),
        ("product_ahead", {"depth": 64}, CLOSE),
        ("batched_flash", {}, CLOSE),
        ("batched_flash", {"interval": 1, "ahead": 2}, CLOSE),
        ("batched_flash", {"interval": 4, "ahead": 8, "cores": 15}, CLOSE),
        ("largest_of", {}, EXACT),
        ("sum_in_parts", {}, CLOSE),
        ("sum_in_parts", {"parts": 4}, CLOSE),
        ("scores_in_parts", {}, CLOSE),
        ("scores_in_parts", {"part": 32}, CLOSE),
    ],
)
def test_a_kernel_has_the_values_of_its_text(name: str, arguments: dict[str, Any], close: float) -> None:
    made, wanted = both(name, **arguments)
    assert not np.isnan(wanted).any()
    assert distance(made, wanted) < close


@pytest.mark.parametrize(
    ("name", "arguments", "close"),
    [
        ("batched_flash", {}, CLOSE),
        ("product_ahead", {}, CLOSE),
        ("sum_in_parts", {}, CLOSE),
        ("running", {}, EXACT),
        ("largest_of", {}, EXACT),
        ("rounded", {}, EXACT),
        ("rounded", {"mode": "CAST_NONE"}, EXACT),
        ("rounded", {"mode": "CAST_TRUNC"}, EXACT),
        ("rounded", {"mode": "round", "fmt": "float32"}, EXACT),
    ],
)
def test_a_run_on_a_device_has_the_values_of_the_text(name: str, arguments: dict[str, Any], close: float) -> None:
    from ttir.stored import stored

    language = Language()
    kernel = load_program(PROGRAMS, name, arguments, language)
    (output,) = kernel.output_names
    (call,) = program_call(PROGRAMS, name, arguments)
    given = {n: drawn(*x.shape, seed=i, fmt=x.fmt) for i, (n, x) in enumerate(call.tensors.items())}
    wanted = executed(kernel, language, {n: x for n, x in given.items() if n != output})[output]
    made = stored(npusim.run(call, hw="ascend_910b2", rows="all"), given)[output]
    assert distance(made, wanted) < close


@pytest.mark.parametrize(
    ("name", "arguments", "why"),
    [
        ("copied_ahead", {"change": "start"}, "x is read before it is written"),
        ("copied_ahead", {"change": "other"}, "a part of the tile x "),
        ("copied_ahead", {"change": "last"}, "a part of the tile x "),
        ("copied_ahead", {"change": "next"}, "a part of the tile x "),
        ("copied_ahead", {"change": "before", "slots": 3}, "a part of the tile x "),
        ("striding", {"rows": 200, "change": "carried"}, "total still has values of the previous task"),
        ("batched_flash", {"change": "filled"}, "left"),
        ("batched_flash", {"change": "slot"}, "the kernel reads weights_of at a different place"),
        ("batched_flash", {"change": "unset"}, "flag between cores"),
        ("batched_flash", {"ahead": 3, "interval": 1}, "a reduction reads only a part of the tile scores"),
        ("sum_in_parts", {"change": "same"}, "the kernel reads W at a different place"),
        ("sum_in_parts", {"change": "number"}, "the kernel reads W at a different place"),
        ("scores_in_parts", {"change": "adds"}, "the kernel reads W at a different place"),
        ("running", {"start": 1.0}, "a part of the tile y "),
        ("rounded", {"mode": "CAST_ROUND"}, "CAST_ROUND; allowed: CAST_CEIL, CAST_FLOOR, CAST_NONE"),
    ],
)
def test_what_only_seems_so_is_refused_with_its_line(name: str, arguments: dict[str, Any], why: str) -> None:
    with pytest.raises(NpusimError, match=why) as caught:
        both(name, **arguments)
    assert str(caught.value).startswith(f"{PROGRAMS}:")


def test_sizes_without_a_number_are_refused() -> None:
    (call,) = program_call(PROGRAMS, "striding", {})
    assert "has sizes that are not constants; give them with -a" in call.configurations[0].refused
    with pytest.raises(NpusimError, match="no argument colums; allowed: columns, tile, cores, stride, change, rows"):
        program_call(PROGRAMS, "striding", {"rows": 64, "colums": 8})


def test_a_tuner_has_a_call_with_its_configurations() -> None:
    (call,) = program_call(PROGRAMS, "tuned", {})
    assert [(c.grid, c.constants, c.refused) for c in call.configurations] == [
        ((4,), {"tile": 16}, ""),
        ((2,), {"tile": 32}, ""),
    ]
