"""README and the words that a user meets: one screen, figures as the pages have them, no phrase of the old dialect."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from npusim.cli.app import app
from npusim.cli.guide import guides
from tests.parsed import docstrings_and_comments, nodes_of_kind, tree_of

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
LONGEST = 120
#: Phrases of the old dialect, as regular expressions.  A phrase that a reader stumbled over is added here when it is
#: replaced, so that it does not come back.
PHRASES = (
    r"how far such estimates were from measured",
    r"all that it is held against",
    r"a site of all there is",
    r"as it is, without a GPU",
    r"in names of the problem",
    r"keys chosen as they come",
    r"layers of two kinds a run takes one",
    r"against that\b",
    r"nothing to do in ",
    r"its last operation is over",
    r"starts and ends instructions",
    r"the axes as declared",
    r"a call that is waited for",
    r"of the least\b",
    r"whose end hangs on",
    r"\bhangs? on\b",
    r"\banew\b",
    r"as they come\b",
    r"\bhold predictions\b",
    r"\bof what was\b",
    r"blocks are dealt out",
    r"spends the time on",
    r"as long as the first\b",
    r"nothing tried makes it invariant",
    r"in no figure here",
    r"moved as one with",
    r"were looked for",
    r"less well met",
    r"waits for room",
    r"nothing left to do",
    r"with what launches take",
    r"never waiting",
    r"busy time rests on",
    r"without a verdict",
    r"was cut by saturation",
    r"filled up to",
    r"run that multiplies",
    r"\bunder way\b",
    r"hand one another",
    r"for want of\b",
    r"sees no key gives",
    r"\bsays nothing of\b",
    r"\bwhat comes next\b",
    r"\ball there is\b",
    r"\bone's own\b",
    r"\bheld against\b",
    r"\bwhat is left\b",
    r"\bwhat was left\b",
    r"\bsays little\b",
    r"\bbits and all\b",
    r"\bdearest\b",
    r"\bwhat ruling it out\b",
    r"\bthen kept\b",
    r"\bof what is no\b",
    r"\bwhat would fit\b",
    r"\btaken apart\b",
    r"\bin a kernel of its own before\b",
    r"\bkeys beside a window\b",
    r"\bdealt in turn\b",
    r"\bwith an eye on\b",
    r"\btell nothing apart\b",
    r"\bstands beside\b",
    r"\bmet within\b",
    r"\bthis page of `",
    r"\bnext to nothing\b",
    r"\bmost's band\b",
    r"\bwhat a practitioner\b",
    r"\bhow far off\b",
    r"\bwhat comes out\b",
    r"\bgroups to end\b",
    r"\bwho measured it\b",
    r"\bwhat the profile\b",
    r"\b1 (?:processes|blocks|points|cases|configurations)\b",
)
#: One by one: the search for an expression that begins with a text is many times as fast as for one of several.
DIALECT = [re.compile(phrase) for phrase in PHRASES]
#: The longest text in each, which is found in a hundredth of the time: where it is not, the phrase is not.
TEXTS = [max(re.split(r"\\.|\(\?:.*?\)|.[?*+]|[^\w ',`-]", phrase), key=len) for phrase in PHRASES]


def _sentences() -> dict[str, str]:
    """Return the texts of users by place: README, guides, studies, the help of each verb, messages of the package."""
    found = {"README.md": README} | {f"npusim help {topic}": text for topic, text in guides().items()}
    pages = [*sorted((ROOT / "reports").rglob("*.md")), *sorted((ROOT / "npusim/cli").glob("new_*"))]
    assert len(pages) > 43
    found |= {str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in pages}
    for name in ("", *(command.name or "" for command in app.registered_commands)):
        told = CliRunner().invoke(app, [*name.split(), "--help"], env={"COLUMNS": "200"})
        found[f"npusim {name} --help"] = " ".join(told.stdout.split())
    for path in sorted(path for part in ("npusim", "reports") for path in (ROOT / part).rglob("*.py")):
        tree = tree_of(path)
        owners: list[ast.Module | ast.ClassDef | ast.FunctionDef] = [
            tree,
            *nodes_of_kind(tree, ast.ClassDef),
            *nodes_of_kind(tree, ast.FunctionDef),
        ]
        documented = {id(o.body[0].value) for o in owners if o.body and isinstance(o.body[0], ast.Expr)}
        place = path.relative_to(ROOT)
        for node in nodes_of_kind(tree, ast.Constant):
            if isinstance(node.value, str) and id(node) not in documented:
                found[f"{place}:{node.lineno}:{node.col_offset}"] = node.value
    return found


def test_no_phrase_of_the_old_dialect_is_left() -> None:
    texts = _sentences()
    every = "\n\n".join(texts.values())
    found = [phrase for text, phrase in zip(TEXTS, DIALECT, strict=True) if text in every and phrase.search(every)]
    left = [f"{where}: {m[0]!r}" for where, text in texts.items() for phrase in found for m in phrase.finditer(text)]
    assert not left, "\n".join(left)


def test_the_readme_is_one_screen_and_names_each_guide() -> None:
    assert len(README.splitlines()) <= LONGEST
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert [link for link in links if not (ROOT / link).exists()] == []
    assert {f"npusim/docs/{topic}.md" for topic in guides()} <= set(links)


def test_the_readmes_accuracy_is_the_pages() -> None:
    rows = json.loads((ROOT / "reports/right/right.json").read_text(encoding="utf-8"))["rows"]
    nvidia, ascend = (next(r for r in rows if r[0] == f"times: {name}") for name in ("H200, other shapes", "910B"))
    outputs = [r for r in rows if "recorded on hardware" in r[1] and "_cut" not in r[1]]
    assert all(row[3] == f"{row[2]} equal" for row in outputs)
    said = " ".join(README.split())
    for name, times in (("NVIDIA H200", nvidia), ("Ascend 910B", ascend)):
        assert f"{name}, {int(times[2]):,} measured times: {times[3]}" in said
    assert f"{sum(int(row[2].replace(',', '')) for row in outputs):,} outputs recorded on hardware" in said


def test_the_trace_of_the_architecture_page_is_what_runs(tmp_path: Path) -> None:
    """Operation, pipe, first and last cycle of the first tile of keys, in the core group that ends last."""
    page = (ROOT / "npusim/README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(.+?)` \| (\w+).*? \| (\d+) \| (\d+) \|", page, re.MULTILINE)
    words = ["run", "flash", "--seq", "512", "-t", "block_kv=128", "--no-numerics", "-o", str(tmp_path / "look")]
    assert CliRunner().invoke(app, words).exit_code == 0
    events = json.loads((tmp_path / "look/trace.json").read_text())["traceEvents"]
    pipes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    first = dict[str, tuple[str, int, int]]()
    for e in events:
        if "start_cycle" in e.get("args", {}):
            place = (pipes[e["pid"], e["tid"]], e["args"]["start_cycle"], e["args"]["end_cycle"])
            first.setdefault(e["name"], place)
    assert len(rows) >= 6
    assert {name: (pipe, int(start), int(end)) for name, pipe, start, end in rows} == {n: first[n] for n, *_ in rows}


#: Words that stood for others (store, build, use, is, measure, say), and how many of them docstrings and comments may
#: have in a thousand lines of code: a ceiling that only falls.
OLD_WORDS = re.compile(r"\b(?:own|whole|anew|nobody|kept|made|taken|lies|found|told)\b", re.IGNORECASE)
OLD_WORDS_CEILING = 4.0


def test_docstrings_and_comments_have_few_words_of_the_old_dialect() -> None:
    words = lines = 0
    for path in (ROOT / "npusim").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        lines += len(text.splitlines())
        words += sum(len(OLD_WORDS.findall(piece)) for _, piece in docstrings_and_comments(text))
    assert lines > 50_000
    assert words / lines * 1000 <= OLD_WORDS_CEILING


@pytest.mark.parametrize("phrase", PHRASES)
def test_a_phrase_is_found_where_it_stands(phrase: str) -> None:
    plain = re.sub(r"\\b|\\", "", phrase).replace("(?:processes|blocks|points|cases|configurations)", "blocks")
    plain = plain.replace("hangs?", "hangs")
    assert any(text in plain and d.search(plain) for text, d in zip(TEXTS, DIALECT, strict=True))
