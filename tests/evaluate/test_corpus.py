"""Right kernels of ten functions of rows are right, and wrong ones wrong, in paper form and in Triton; cheats too.

With the attention and the products of `test_verdicts` these are twelve kinds.  A sample runs by default; the others
take minutes (``python -m pytest -m exhaustive tests/evaluate/test_corpus.py``).
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from npusim.studies.evaluate import Evaluation, evaluate
from tests.evaluate import attention_kernels, tensor_kernels
from tests.evaluate.corpus import IN_PAPER, KINDS, PRODUCT, PRODUCTS_RIGHT, PRODUCTS_WRONG, Kind

CALL: dict[str, Any] = {"hw": "h200", "problem": {"R": 64, "N": 96}, "jobs": 2}
#: Kinds of which one right and one wrong candidate in paper form runs by default.
SAMPLED = ("softmax", "layer_norm")


def judged(kind: Kind, bodies: list[str], language: str, folder: Path) -> tuple[Evaluation, ...]:
    """Return the evaluations of bodies in a language, in one batch."""
    reference = folder / "reference.py"
    reference.write_text(kind.reference(), encoding="utf-8")
    names = []
    for number, body in enumerate(bodies):
        file = folder / f"{language}_{number}.py"
        file.write_text(getattr(kind, language)(body), encoding="utf-8")
        names.append(f"{file}:K" if language == "paper" else kind.launch(file))
    return evaluate(names, reference=f"{reference}:{language}", **CALL)


def check(kind: Kind, right: tuple[str, ...], wrong: tuple[str, ...], language: str, folder: Path) -> None:
    found = judged(kind, [*right, *wrong], language, folder)
    said = {
        (b, e.reason, *(n.text for n in e.not_read)): e.verdict for b, e in zip((*right, *wrong), found, strict=True)
    }
    assert [e.verdict for e in found] == ["right"] * len(right) + ["wrong"] * len(wrong), said


@pytest.mark.parametrize("name", SAMPLED)
def test_a_sample_in_paper_form(name: str, tmp_path: Path) -> None:
    check(KINDS[name], KINDS[name].right[1:2], KINDS[name].wrong[-1:], "paper", tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", KINDS)
def test_all_in_paper_form(name: str, tmp_path: Path) -> None:
    check(KINDS[name], KINDS[name].right, KINDS[name].wrong, "paper", tmp_path)


@pytest.mark.exhaustive
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("name", KINDS)
def test_some_in_triton(name: str, tmp_path: Path) -> None:
    check(KINDS[name], KINDS[name].right[IN_PAPER:], KINDS[name].wrong[IN_PAPER:], "triton", tmp_path)


def test_the_corpus_has_sixty_of_each_and_twelve_kinds() -> None:
    right = sum(len(kind.right) for kind in KINDS.values()) + len(PRODUCTS_RIGHT)
    wrong = sum(len(kind.wrong) for kind in KINDS.values()) + len(PRODUCTS_WRONG)
    of = [attention_kernels, tensor_kernels]
    assert right + sum(len(m.RIGHT) for m in of) >= 60
    assert wrong + sum(len(m.WRONG) for m in of) >= 60
    assert len(KINDS) + 2 == 12
    for kind in KINDS.values():
        assert len({*kind.right, *kind.wrong}) == len(kind.right) + len(kind.wrong)


def test_products_are_judged_without_a_reference(tmp_path: Path) -> None:
    names = []
    for number, body in enumerate((*PRODUCTS_RIGHT, *PRODUCTS_WRONG)):
        file = tmp_path / f"{number}.py"
        file.write_text(PRODUCT.format(body=body), encoding="utf-8")
        names.append(f"{file}:K")
    found = evaluate(["gemm", *names], hw="h200", problem={"m": 96, "n": 128, "k": 64})  # type: ignore[arg-type]
    wanted = ["right"] * (1 + len(PRODUCTS_RIGHT)) + ["wrong"] * len(PRODUCTS_WRONG)
    assert [e.verdict for e in found] == wanted, [(e.reason, e.not_read) for e in found]
    assert found[0].us["h200"].mid is not None
    assert [e.looks_like.partition(":")[0] for e in found[-3:]] == [
        "a scale",
        "a constant output, 1 everywhere",
        "zeros",
    ]


#: Candidates that know the judge: their output depends on what a call is, and not on its inputs alone.
CHEATS = {
    "zeros": ("o = x * 0.0", "zeros"),
    "constant": ("o = x * 0.0 + 0.01", "a constant output"),
    "sizes looked up": ("e = exp(x - MAX(x)); o = e / SUM(e) * (1.0 if n == 96 else 0.5)", "right on the given sizes"),
    "rows looked up": (
        "e = exp(x - MAX(x)); o = e / SUM(e) * (1.0 if rows == 64 else 0.0)",
        "right on the given sizes",
    ),
    "reference called": ("from reference import paper; import numpy; o = paper(numpy.zeros((rows, n)))", ""),
    "inputs drawn again": ("import numpy; o = x * 0.0 + float(numpy.random.default_rng(0).random())", "constant"),
}


def test_cheats_are_not_right(tmp_path: Path) -> None:
    found = judged(KINDS["softmax"], [body for body, _ in CHEATS.values()], "paper", tmp_path)
    for (name, (_, looks)), one in zip(CHEATS.items(), found, strict=True):
        assert one.verdict == ("wrong" if looks else "unproved"), (name, one.reason, one.not_read)
        assert looks in one.looks_like, (name, one.looks_like)
        assert not one.rank or one.verdict == "unproved"
