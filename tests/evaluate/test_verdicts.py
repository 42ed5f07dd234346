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
CALL = {"heads": 2, "kv_heads": 1, "seq_q": 128, "seq_kv": 128, "head_dim": 64, "causal": True, "dtype": "float16"}
#: Nothing of the tile is left to choose: each candidate's process would choose for itself.
TILE = {"block_q": 64, "block_kv": 64, "warps": 4, "stages": 3, "launch": "longest_first"}
#: A call that is judged sooner: one block of queries and keys.
SMALL = {**CALL, "heads": 1, "seq_q": 64, "seq_kv": 64}
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


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that stores the evaluations of all kernels."""
    return tmp_path_factory.mktemp("evaluated") / "done.jsonl"


@pytest.fixture(scope="module")
def corpus(store: Path) -> dict[str, Evaluation]:
    """The evaluations of all kernels, in one batch that shares its referee."""
    names = [f"{FILE}:{name}" for name in (*RIGHT, *WRONG)]
    found = evaluate(names, hw="h200", problem=CALL, tiling=TILE, jobs=2, store=store)  # type: ignore[arg-type]
    return {e.kernel.rpartition(":")[2]: e for e in found}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_kernel_is_right_whatever_its_order(name: str, corpus: dict[str, Evaluation]) -> None:
    found = corpus[name]
    assert found.verdict == "right", (found.reason, found.not_read)
    assert found.judged == 11
    assert found.us["h200"].mid is not None
    assert found.bits == "equal" or found.bits.startswith("class ")
    assert "h200" in found.rank


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_kernel_is_wrong_and_says_why(name: str, corpus: dict[str, Evaluation]) -> None:
    found = corpus[name]
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
        call = {**SMALL, "causal": False}
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
    "file": ("open({elsewhere!r}, 'w').write('x')", "must not change"),
    "exit": ("import os\nos._exit(0)", "ended with exit code 0"),
    "signal": ("import os, signal\nos.kill(os.getppid(), signal.SIGTERM)", "not permitted"),
}


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Evaluation]]:
    """The path that the hostile candidates may not write, and their evaluations: all but the loop in one batch."""
    folder, found = tmp_path_factory.mktemp("hostile"), {}
    for name, (code, _) in HOSTILE.items():
        text = code.format(elsewhere=str(folder / "elsewhere")) + "\n"
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    loop = [f"{folder / 'loop.py'}:k"]
    others = [f"{folder / name}.py:k" for name in HOSTILE if name != "loop"]
    for names, seconds in (loop, 2.0), (others, 5.0):  # a loop computes all the time that it has
        done = evaluate(names, hw="h200", problem=SMALL, limits=Limits(seconds=seconds))  # type: ignore[arg-type]
        found |= {Path(e.kernel.rpartition(":")[0]).stem: e for e in done}
    return folder / "elsewhere", found


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_candidate_is_a_verdict_and_touches_nothing(
    name: str, hostile: tuple[Path, dict[str, Evaluation]]
) -> None:
    elsewhere, found = hostile
    assert found[name].verdict != "right"
    assert HOSTILE[name][1] in found[name].reason, found[name]
    assert not elsewhere.exists()


def test_a_stored_candidate_is_not_computed_again(
    corpus: dict[str, Evaluation], store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = store.read_text(encoding="utf-8").splitlines()
    assert len(lines) == len(corpus)
    assert all(json.loads(line) for line in lines)
    monkeypatch.setattr("npusim.studies.evaluate.evaluation.CandidateProcess", None)  # none is started
    call: dict[str, Any] = {"hw": "h200", "problem": CALL, "tiling": TILE, "store": store}
    (again,) = evaluate(f"{FILE}:half", **call)
    assert again == corpus["half"]
    assert store.read_text(encoding="utf-8").splitlines() == lines


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
