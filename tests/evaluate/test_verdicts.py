"""Right kernels are right and wrong ones wrong, by a referee that is none of theirs; foreign code stays confined."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from npusim.config.problem import GemmProblem
from npusim.studies.evaluate import Evaluation, evaluate, referee
from npusim.studies.evaluate.limits import Limits
from tests.evaluate import tensor_kernels
from tests.evaluate.attention_kernels import RIGHT, WRONG

HERE = Path(__file__).parent
FILE, PRODUCTS = HERE / "attention_kernels.py", HERE / "tensor_kernels.py"
CALL = {"heads": 2, "kv_heads": 1, "seq_q": 256, "seq_kv": 256, "head_dim": 64, "causal": True, "dtype": "float16"}
#: Words of the diagnosis of some faults.
LOOKS = {
    "no_scale": "a scale: scale left out",
    "scale_twice": "a scale: scale twice",
    "scale_off": "a scale: scores are about 1.02",
    "no_mask": "a mask: causal=False",
    "tile_alone": "a tile dropped",
    "halved": "a scale: outputs are 0.5 times",
    "nothing": "zeros",
    "half": "a constant output, 0.5 everywhere",
    "peeked": "right on the given sizes, wrong on: sizes that do not divide",
}


@cache
def corpus() -> dict[str, Evaluation]:
    """Return the evaluations of all kernels, in one batch that shares its referee."""
    names = [f"{FILE}:{name}" for name in (*RIGHT, *WRONG)]
    found = evaluate(names, hw="h200", problem=CALL, tiling={"block_kv": 64}, jobs=2)  # type: ignore[arg-type]
    return {e.kernel.rpartition(":")[2]: e for e in found}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_kernel_is_right_whatever_its_order(name: str) -> None:
    found = corpus()[name]
    assert found.verdict == "right", (found.reason, found.not_read)
    assert found.judged == 10
    assert found.us["h200"].mid is not None
    assert found.bits == "equal" or found.bits.startswith("class ")
    assert "h200" in found.rank


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_kernel_is_wrong_and_says_why(name: str) -> None:
    found = corpus()[name]
    assert found.verdict == "wrong", (found.reason, found.not_read)
    assert found.bits == "different"
    assert not found.rank
    assert LOOKS.get(name, "") in found.looks_like
    assert found.worst is not None
    assert found.worst.first is not None


@cache
def products() -> dict[str, Evaluation]:
    """Return the evaluations of kernels of plain tensors, a batch for each function that they should compute."""
    found: dict[str, Evaluation] = {}
    both = {**tensor_kernels.RIGHT, **tensor_kernels.WRONG}
    for reference in sorted(set(both.values())):
        names = [f"{PRODUCTS}:{name}" for name, of in both.items() if of == reference]
        call = {**CALL, "heads": 1, "seq_q": 64, "seq_kv": 64, "causal": False}
        how = {"reference": f"{PRODUCTS}:{reference}", "hw": "h200", "problem": call, "jobs": 2}
        found |= {e.kernel.rpartition(":")[2]: e for e in evaluate(names, **how)}  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize("name", [*tensor_kernels.RIGHT, *tensor_kernels.WRONG])
def test_a_function_on_arrays_judges_products(name: str) -> None:
    found = products()[name]
    assert found.verdict == ("right" if name in tensor_kernels.RIGHT else "wrong"), (found.reason, found.not_read)


HOSTILE = {
    "loop": ("while True: pass", "no answer within"),
    "memory": ("x = bytearray(1 << 36)", "MemoryError"),
    "fork": ("import os\nwhile True: os.fork()", "not permitted"),
    "socket": ("import socket\nsocket.create_connection(('127.0.0.1', 9))", "not permitted"),
    "file": ("open({elsewhere!r}, 'w').write('x')", "may not change"),
    "exit": ("import os\nos._exit(0)", "ended with exit code 0"),
    "signal": ("import os, signal\nos.kill(os.getppid(), signal.SIGTERM)", "not permitted"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_candidate_is_a_verdict_and_touches_nothing(name: str, tmp_path: Path) -> None:
    code, words = HOSTILE[name]
    elsewhere = tmp_path / "elsewhere"
    kernel = tmp_path / "hostile.py"
    kernel.write_text(code.format(elsewhere=str(elsewhere)) + "\n", encoding="utf-8")
    limits = Limits(seconds=2.0 if name == "loop" else 5.0)  # all of which a loop computes
    (found,) = evaluate(f"{kernel}:k", hw="h200", problem=CALL, limits=limits)  # type: ignore[arg-type]
    assert found.verdict != "right"
    assert words in found.reason, found
    assert not elsewhere.exists()


def test_a_stored_candidate_is_not_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = tmp_path / "done.jsonl"
    kernel = f"{FILE}:half"
    (first,) = evaluate(kernel, hw="h200", problem=CALL, store=store)  # type: ignore[arg-type]
    assert len(store.read_text(encoding="utf-8").splitlines()) == 1
    json.loads(store.read_text(encoding="utf-8"))
    monkeypatch.setattr("npusim.studies.evaluate.evaluation.CandidateProcess", None)  # none is started
    (again,) = evaluate(kernel, hw="h200", problem=CALL, store=store)  # type: ignore[arg-type]
    assert again == first


def test_a_product_is_computed_for_the_judged_rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = list[int]()

    def counted(problem: GemmProblem, a: Any, b: Any) -> Any:
        rows.append(a.shape[2])
        return referee.product(problem, a, b)

    monkeypatch.setattr(referee, "FUNCTIONS", {GemmProblem: counted})
    (found,) = evaluate("gemm", hw="h200", problem={"m": 1031, "n": 64, "k": 64})  # type: ignore[arg-type]
    assert found.verdict == "right"
    assert rows[0] < 1031 / 4  # the given call's sample
    assert set(rows) > {rows[0]}
    assert found.worst is not None
    assert found.worst.matched == found.worst.total
