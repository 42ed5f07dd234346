"""npusim's own programs as the text of TileLang-Ascend: read back, checked, proved, and what has no text refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from ttir.stored import stored

import npusim
from npusim.kernels.tilelang.ascend_recording import program_call
from npusim.simulation.request import Request
from npusim.simulation.written_program import written_program
from npusim.studies.flags import check_program
from tests.tile_language.flag_programs import written
from tests.tile_language.test_developer import drawn

if TYPE_CHECKING:
    from pathlib import Path

#: One slice of rows on each vector core, and blocks that do not overlap.
TILE = {"block_q": 64, "block_kv": 64, "vector_rows": 32, "pipeline": "block"}


def request(schedule: str = "flash", **sizes: Any) -> Request:
    how: dict[str, Any] = {"workload": "pangu_38b", "hw": "ascend_910b2", "causal": False, **sizes}
    return Request(schedule=schedule, **how)


def text_of(folder: Path, every: str = "", **sizes: Any) -> Path:
    return written(folder, written_program(request(**sizes), every=every), "emitted.py")


def call_of(path: Path, given: dict[str, Any], **arguments: object) -> Any:
    from dataclasses import replace

    (call,) = program_call(path, "flash", arguments)
    return replace(call, arguments={n: replace(x, data=given[n]) for n, x in call.tensors.items()})


@pytest.mark.parametrize(
    ("seq", "heads", "dim", "tiling"),
    [
        (256, 2, 64, {"depth": 0}),
        (320, 5, 64, {"depth": 1}),
        (320, 5, 64, {"depth": 2}),
        (384, 5, 64, {"depth": 3}),
        (512, 3, 128, {"depth": 2, "block_q": 64, "block_kv": 128}),
        (512, 4, 32, {"depth": 2, "block_kv": 128}),
        (256, 2, 64, {"depth": 1, "order": "groups"}),
        (256, 2, 64, {"depth": 0, "order": "serial"}),
    ],
)
def test_a_text_has_the_bits_of_its_program_and_no_fault(
    seq: int, heads: int, dim: int, tiling: dict[str, Any], tmp_path: Path
) -> None:
    sizes = {"seq": seq, "q_heads": heads, "kv_heads": heads, "head_dim": dim, "tiling": TILE | tiling}
    path = text_of(tmp_path, **sizes)
    assert not check_program(path, "flash").faults
    q, k, v = (drawn(1, heads, seq, dim, seed=i) for i in range(3))
    given = {"q": q, "k": k, "v": v, "o": np.zeros_like(q)}
    made = stored(npusim.run(call_of(path, given), hw="ascend_910b2", rows="all"), given)["o"]
    how: Any = {"tiling": sizes["tiling"], "causal": False, "rows": "all", "heads": "all"}
    packaged = npusim.run("flash", tensors={"q": q, "k": k, "v": v}, hw="ascend_910b2", **how)
    assert packaged.output is not None
    assert np.array_equal(made, packaged.output)
