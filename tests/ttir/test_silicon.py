"""Triton kernels whose every stored bit is an H200's: attention, its gradients, decoding, norms, losses, products."""

from __future__ import annotations

import functools
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import npusim

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: npusim[triton]"),
    pytest.mark.usefixtures("without_warp_code"),
]
HERE = Path(__file__).parent
#: Cases that npusim refuses, and why; all else is measured and equal.
REFUSED = {f"counted_mean_{n}": "read after the loop along its axis, but on" for n in ("1500_512", "700_512")}
#: Cases of which single elements differ.  Of a lane's first two products a sum of products rounds the second one here;
#: code of rows that are loaded element by element rounds the first (one of 8,000 outputs).  Of means by lanes the
#: chip's digest is that of a contracted division in the loop without a mask, and of lanes that hold neighbours.
UNLIKE = ("ln_bwd_bf16_1000", "counted_mean_1024_256")
#: A case of each kind by default, and one that vector code joins; all with ``-m exhaustive``.
EVERY, JOINED = 9, "merge_f16"


@functools.cache
def _cases() -> dict[str, Any]:
    from ttir import silicon_cases

    return {case.name: case for case in (*silicon_cases.first(), *silicon_cases.second(), *silicon_cases.third())}


def _names() -> list[Any]:
    stored = json.loads((HERE / "silicon_h200.json").read_text())["results"]
    names = [
        n
        for n in dict.fromkeys(key.partition("/")[0] for key in stored)
        if not n.startswith(tuple(REFUSED)) and n not in UNLIKE
    ]
    return [
        pytest.param(n, marks=[] if i % EVERY == 0 or n == JOINED else pytest.mark.exhaustive)
        for i, n in enumerate(names)
    ]


@pytest.mark.parametrize("name", _names())
def test_a_kernel_s_results_are_those_of_an_h200(name: str) -> None:
    """Inputs are drawn as on the chip (`reports/silicon/triton_bits.py`); Triton 3.6."""
    from triton import __version__ as release

    from ttir import silicon_cases, silicon_kernels
    from ttir.stored import stored

    if not release.startswith("3.6"):
        pytest.skip("sums of other releases have other orders")
    given, case = json.loads((HERE / "silicon_h200.json").read_text()), _cases()[name]
    assert silicon_cases.digest_of_inputs(case) == given["inputs"][name], "numpy draws other inputs"
    with npusim.record(floats=True) as calls:
        getattr(silicon_kernels, case.kernel)[case.grid](**case.words, **case.options)
    made = stored(npusim.run(calls[-1], hw="h200", rows="all"), case.words)
    wanted = {key.partition("/")[2]: digest for key, digest in given["results"].items() if key.startswith(f"{name}/")}
    assert wanted
    with np.errstate(over="ignore", invalid="ignore"):
        for result, digest in wanted.items():
            assert silicon_cases.digest(np.asarray(made[result]).astype(case.words[result].dtype)) == digest, result


@pytest.mark.parametrize("kind", REFUSED)
def test_a_kernel_that_is_not_read_is_refused_by_name(kind: str) -> None:
    from ttir import silicon_kernels

    case = next(case for name, case in _cases().items() if name.startswith(kind))
    with npusim.record(floats=True) as calls:
        getattr(silicon_kernels, case.kernel)[case.grid](**case.words, **case.options)
    with pytest.raises(npusim.NpusimError, match=REFUSED[kind]):
        npusim.run(calls[-1], hw="h200", rows="all")
