"""Python and notebooks: frames for pandas, text as a size, and keywords that are near one."""

from __future__ import annotations

import inspect
import json
import re
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from typer.testing import CliRunner

import npusim
from npusim.cli.app import app
from npusim.errors import NpusimError
from npusim.report.comparison import comparison_document
from npusim.report.text import to_json
from npusim.simulation.request import Count, RunOptions
from npusim.studies.validate.measured_times import validate_times

pytestmark = pytest.mark.usefixtures("declared_tiles")

NOTEBOOK = Path(__file__).parents[1] / "reports" / "notebook" / "notebook.ipynb"


@pytest.fixture
def pandas(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return pandas, or where it is not installed what stands for its frame: rows."""
    try:
        import pandas
    except ImportError:
        pandas = SimpleNamespace(DataFrame=lambda rows: rows)
        monkeypatch.setitem(sys.modules, "pandas", pandas)
    return pandas


def records(frame: Any) -> list[dict[str, Any]]:
    return frame if isinstance(frame, list) else frame.to_dict("records")


@pytest.mark.usefixtures("pandas")
def test_results_comparisons_searches_and_validations_are_frames(tmp_path: Path) -> None:
    first = npusim.run("flash", seq="512", numerics=False)
    other = npusim.run("flash", seq=512, tiling={"block_kv": 128}, numerics=False)
    cores = records(first.to_pandas())
    assert {row["method"] for row in cores} == {first.timing.method if first.timing else ""}
    assert len(cores) == len(next(iter(first.pipes().values())))
    compared = {row["figure"]: row for row in records(npusim.compare(first, other).to_pandas())}
    labels = npusim.compare(first, other).labels
    assert [compared["cycles"][label] for label in labels] == [first.timing.cycles, other.timing.cycles]  # type: ignore[union-attr]
    found = npusim.explore("flash", {"block_kv": [128, 256]}, seq=512)
    points = records(found.to_pandas())
    assert [p["block_kv"] for p in points] == [128, 256]
    assert min(p["latency_us"] for p in points if p["status"] == "ok") == found.best.latency_us  # type: ignore[union-attr]
    case = (
        "  - {{name: m{0}, hw: v100, schedule: gemm, workload: {{m: {0}, n: 64, k: 64}}, measured: {{latency_us: 9}}}}"
    )
    file, cases_text = tmp_path / "measured.yaml", "\n".join(map(case.format, (64, 128)))
    file.write_text(f"schema: npusim.measurements/1\nsource: s\nband: 0.1\ncases:\n{cases_text}\n", encoding="utf-8")
    report = validate_times(file)
    cases = records(report.to_pandas())
    assert [(c["name"], c["measured_low"], c["relative_error"]) for c in cases] == [
        (r.name, r.measured.low, r.relative_error) for r in report.residuals
    ]


def test_names_of_schedules_are_compared_as_the_command_line_compares_them() -> None:
    comparison = npusim.compare("flash", "pasa", seq=128, numerics=False)
    shown = CliRunner().invoke(app, ["compare", "flash", "pasa", "--seq", "128", "--no-numerics", "--json"])
    assert shown.exit_code == 0
    assert json.loads(to_json(comparison_document(comparison))) == json.loads(shown.stdout)
    result = npusim.run("flash", seq=128, numerics=False)
    mixed = npusim.compare(result, "pasa", seq=128, numerics=False)
    assert [sheet.cycles for sheet in mixed.sheets] == [sheet.cycles for sheet in comparison.sheets]


def test_a_comparison_refuses_words_that_name_nothing_and_options_that_nothing_reads() -> None:
    with pytest.raises(NpusimError, match="no run folder or result of that name"):
        npusim.compare("flash", "pasaa")
    result = npusim.run("flash", seq=64, numerics=False)
    with pytest.raises(NpusimError, match="seq: npusim does not run stored runs again"):
        npusim.compare(result, result, seq=128)
    with pytest.raises(TypeError, match="sqe"):
        npusim.compare("flash", "pasa", sqe=128)


def test_without_pandas_a_frame_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(NpusimError, match="python -m pip install pandas"):
        npusim.run("flash", seq=256, numerics=False).to_pandas()


@pytest.mark.parametrize(
    ("wrong", "near"),
    [("sequence", "seq"), ("tilling", "tiling"), ("precison", "precision"), ("workloads", "workload")],
)
def test_an_unknown_keyword_is_answered_with_a_near_one(wrong: str, near: str) -> None:
    call: Any = npusim.run
    with pytest.raises(TypeError, match=rf"'{wrong}'. Did you mean `{near}`\?"):
        call("flash", **{wrong: 1})


def test_a_size_may_be_text_and_its_type_says_so() -> None:
    assert npusim.run("flash", seq="1k", numerics=False).problem.seq_q == 1024  # type: ignore[union-attr]
    assert get_args(Count) == (int, str)
    assert {RunOptions.__annotations__[name].__forward_arg__ for name in ("seq", "batch")} == {"Count | None"}


def test_the_docstring_of_run_begins_with_ten_options_and_has_all() -> None:
    text = inspect.getdoc(npusim.run) or ""
    first, _, others = text.partition("Other Parameters\n---")
    head = re.search(r"Ten options are enough for most runs: (.*?)\.\s", first, re.DOTALL)
    assert head
    ten = re.findall(r"``(\w+)``", head[1])
    assert len(ten) == 10
    listed = {name for line in re.findall(r"(?m)^([a-z][\w, ]*)$", first) for name in line.split(", ")}
    assert listed == {"schedule", *ten}
    names = {name for line in re.findall(r"(?m)^([a-z][\w, ]*)$", others) for name in line.split(", ")}
    assert {*inspect.signature(npusim.run).parameters} - {"schedule", *ten} <= names


def _stored_picture(file: str) -> str:
    """Return a picture, as IPython's class of this name reads one."""
    text = Path(file).read_text(encoding="utf-8")
    assert text.startswith("<svg")
    return text


def test_the_notebook_is_stored_with_its_outputs_and_two_pictures() -> None:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert all(cell["outputs"] for cell in code)
    outputs = [output for cell in code for output in cell["outputs"]]
    assert [output["output_type"] for output in outputs if output["output_type"] in ("error", "stderr")] == []
    assert sum("image/svg+xml" in output.get("data", ()) for output in outputs) == 2
    assert "/home/" not in NOTEBOOK.read_text(encoding="utf-8")


def test_the_notebook_runs_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells are run one after the other in one namespace, as a notebook runs them; commands by the same process."""
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(SVG=_stored_picture))
    if find_spec("IPython") is None:
        monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace())
    names: dict[str, Any] = {"display": lambda *shown: [getattr(one, "_repr_html_", lambda: "")() for one in shown]}
    for cell in code:
        text = "".join(cell["source"])
        if text.startswith("%%writefile "):
            file, _, rest = text.removeprefix("%%writefile ").partition("\n")
            (tmp_path / file).write_text(rest, encoding="utf-8")
            continue
        for command in re.findall(r"(?m)^!npusim (.*?)(?: > \S+(?: 2>&1)?)?$", text):
            assert CliRunner().invoke(app, shlex.split(command)).exit_code == 0, command
        exec(compile(re.sub(r"(?m)^!.*$", "", text), NOTEBOOK.name, "exec"), names)
    assert names["found"].best.status == "ok"
    assert names["comparison"].latency is not None
    assert names["own"].numerics.error.rmse < 1e-2
