"""Pages: nothing of others' becomes a tag or a script, every chart has its numbers, and a browser draws them all."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from itertools import combinations, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from npusim.errors import NpusimError, SpecError
from npusim.report import charts, page
from npusim.report.output import save_run
from npusim.report.page import run_page, saved_page
from npusim.report.page_figures import FIGURES_FILE, figures_document, load_figures
from npusim.report.result_json import record_of
from npusim.report.timeline import timeline_of
from npusim.run import run
from npusim.simulation.request import Request
from npusim.studies.explore.exploration import search
from npusim.studies.explore.search import Options
from npusim.studies.explore.space import SearchRequest

if TYPE_CHECKING:
    from npusim.report.result_json import RunRecord
    from npusim.run import RunResult

pytest.importorskip("altair", reason="the extra `report` is not installed")

pytestmark = pytest.mark.usefixtures("declared_tiles")
PLANTED = '<script>alert("x")</script><img src=x onerror=alert(1)>{{ 7 * 7 }}'


@pytest.fixture(scope="module")
def computed() -> RunResult:
    """Flash with bits, in which scores overflow."""
    return run("flash", seq=512, workload="pasa_uniform", precision="fa16_32", heads=[0, 1], diagnose=True)


@pytest.fixture(scope="module")
def drawn(computed: RunResult) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(figures_document(computed, timeline_of(computed)), allow_nan=False))
    return found


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages without the megabyte of the library, which takes a while to put together."""
    monkeypatch.setattr(page, "_vega", lambda: "window.vegaEmbed = null;")


class _Reader(HTMLParser):
    """Tags, texts and attributes of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def hostile(record: RunRecord) -> RunRecord:
    return replace(record, workload=PLANTED, notes=(PLANTED,), schedule=PLANTED, precision="\x1b[31mred")


def test_a_page_has_the_notices_of_the_library_that_it_inlines() -> None:
    html = page.page_html("x", [])
    script = html[html.index("<script>/*!") :]
    notices, _, code = script.partition("*/")
    assert "Copyright (c) 2015-2023, University of Washington Interactive Data Lab" in notices
    assert "must reproduce the above copyright notice" in notices
    assert "Copyright 2010-2023 Mike Bostock" in notices
    assert "window.vegaEmbed" in code[: code.index("</script>")]


@pytest.mark.usefixtures("light")
def test_what_others_wrote_stays_text_and_every_chart_has_its_numbers(
    computed: RunResult, drawn: dict[str, Any]
) -> None:
    drawn = json.loads(json.dumps(drawn).replace("softmax", "</script><script>alert(2)//"))
    found = _Reader(run_page(hostile(record_of(computed)), drawn))
    assert [s.get("id") or s.get("type") for s in found.all("script")] == ["charts", None, None]
    assert not found.all("img")
    assert any(PLANTED in text for text in found.texts), "shown as it was written"
    assert not any("\x1b" in text for text in found.texts)
    policy = found.all("meta")[1]["content"] or ""
    assert policy.startswith("default-src 'none'")
    assert "unsafe-eval" not in policy
    assert re.search(r"script-src 'sha256-[^']+' 'sha256-[^']+'", policy)

    keys = [figure["id"] for figure in found.all("figure")]
    assert keys == [
        "time",
        "window0",
        "window1",
        "window2",
        "roofline",
        "memories",
        "errors",
        "constants",
        "program-0",
        "program-1",
    ]
    charts = [key for key in keys if key not in ("memories", "constants", "program-0", "program-1")]
    assert [d["data-chart"] for d in found.all("div") if "data-chart" in d] == charts
    # Every chart has its numbers and its words.
    assert len(found.all("table")) == len(found.all("details")) == len(keys)
    for scrolled in (d for d in found.all("div") if d.get("class") == "scroll"):
        assert scrolled["tabindex"] == "0", "what scrolls can be reached by the keyboard"
        assert scrolled["aria-label"]
    texts = " ".join(found.texts)
    assert "not finite" in texts


def test_figures_say_what_the_run_did(computed: RunResult, drawn: dict[str, Any]) -> None:
    assert computed.timing is not None
    assert computed.numerics is not None
    assert [w["name"] for w in drawn["windows"]] == ["Prologue", "Steady state", "Epilogue"]
    assert drawn["windows"][-1]["end_us"] == pytest.approx(
        max(s.end for s in computed.timing.spans) / computed.timing.clock_hz * 1e6, abs=1e-3
    )
    rows = drawn["rows"]
    assert {r["head"] for r in rows} == {"0", "1"}
    assert all(r["error"] is None and r["nonfinite_rows"] == r["last_row"] - r["first_row"] + 1 for r in rows)
    assert sum(r["overflows"] for r in rows) == sum(computed.numerics.overflow_counts.values())


@pytest.mark.usefixtures("light")
def test_saved_run_has_its_figures_and_one_without_them_gives_fewer(
    tmp_path: Path, computed: RunResult, drawn: dict[str, Any]
) -> None:
    folder = save_run(computed, tmp_path / "a", trace=False)
    assert load_figures(folder) == drawn
    (folder / FIGURES_FILE).unlink()
    assert load_figures(folder) is None
    fewer = [f["id"] for f in _Reader(saved_page([folder / "result.json"])).all("figure")]
    assert fewer == ["time", "roofline", "constants"]


@pytest.mark.usefixtures("light")
def test_page_of_a_comparison_shows_parts_that_add_up_then_each_run(tmp_path: Path, computed: RunResult) -> None:
    folders = [save_run(computed, tmp_path / "a", trace=False), tmp_path / "b"]
    other = run("flash", seq=512, workload="pasa_uniform", precision="fa2_fp32", numerics=False)
    save_run(other, folders[1], trace=False)
    text = saved_page(folders)
    found = _Reader(text)
    keys = [f["id"] or "" for f in found.all("figure")]
    assert keys[:3] == ["changes", "inputs", "run1-time"], "no errors: no place in latency against error"
    assert {"run1-time", "run2-time", "run1-errors"} <= set(keys)
    assert len(set(keys)) == len(keys)
    charts = json.loads(text.split('id="charts">')[1].split("</script>")[0])["charts"]
    parts = sum(row["value"] for row in charts["changes"]["datasets"]["rows"])
    assert parts == pytest.approx(other.latency_us - computed.latency_us, abs=0.01)
    # The first chart stands above the words; what differs and each run open on demand.
    assert text.index('data-chart="changes"') < text.index('<div class="summary">')
    runs = [d.get("id") for d in found.all("details") if d.get("class") == "part"]
    assert runs == ["run1", "run2"]
    assert not any("open" in d for d in found.all("details") if d.get("class") == "part")
    differing = text[text.index('id="inputs"') :].partition("</figure>")[0]
    assert "<details>" in differing
    assert "precision</td>" in differing
    assert " -&gt; " not in differing


@pytest.mark.usefixtures("light")
def test_page_of_a_search_ranks_maps_and_keeps_the_reasons(tmp_path: Path) -> None:
    table = tmp_path / "found.csv"
    table.write_text(
        "block_q,depth,status,cycles,latency_us,busiest,busy_share,relative_rmse,reason\n"
        "64,1,ok,1000,30.5,VECTOR,0.5,0.001,\n64,2,ok,900,20.5,VECTOR,0.6,0.002,\n"
        f'128,1,ok,950,25.0,CUBE,0.6,0.003,\n128,2,infeasible,,,,,,"{PLANTED.replace(chr(34), chr(39))}"\n'
    )
    text = saved_page([table])
    found = _Reader(text)
    assert [f["id"] for f in found.all("figure")] == ["front", "ranking", "map0", "left"]
    assert len(found.all("script")) == 3
    drawn = json.loads(text.split('id="charts">')[1].split("</script>")[0])["charts"]
    assert [p["name"] for p in drawn["front"]["datasets"]["points"] if p["is_front"]] == ["depth=2", "depth=1"], (
        "named by what tells them apart"
    )
    assert {n["name"] for n in drawn["front"]["datasets"]["names"]} == {"depth=2", "depth=1"}
    assert [(c["x"], c["y"], c["value"]) for c in drawn["map0"]["datasets"]["cells"]] == [
        ("64", "1", 30.5),
        ("64", "2", 20.5),
        ("128", "1", 25.0),
        ("128", "2", None),
    ]
    table.write_text("a,b\n1,2\n")
    with pytest.raises(
        SpecError, match=r"found\.csv: not a table of npusim explore: it has no column latency_us, status"
    ):
        saved_page([table])


@pytest.mark.parametrize(
    ("text", "error"),
    [("[", "not a JSON file"), ('{"kind": "npusim.figures", "schema_version": 99}', "the figures are not of this")],
)
def test_broken_figures_are_refused(tmp_path: Path, text: str, error: str) -> None:
    (tmp_path / FIGURES_FILE).write_text(text)
    with pytest.raises(SpecError, match=rf"figures\.json: {error}"):
        load_figures(tmp_path)


def test_without_the_extra_a_page_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "altair", None)
    with pytest.raises(NpusimError, match=r"python -m pip install 'npusim\[report\]'"):
        charts.altair()


@pytest.mark.parametrize("name", ["light", "dark"])
def test_text_can_be_read_on_its_ground(name: str) -> None:
    """WCAG 2.2: 4.5 for text, 3 for marks that carry meaning; grounds are those of page.css."""
    ground = {"light": "#ffffff", "dark": "#14181d"}[name]
    look = page.theme(name)
    texts = [look["axis"]["labelColor"], look["legend"]["labelColor"], look["style"]["label"]["color"]]
    assert all(_contrast(c, ground) >= 4.5 for c in texts)
    inside = look["style"]["inside"]["color"]
    assert all(_contrast(inside, tile) >= 4.5 for tile in look["range"]["ordinal"])
    marks = [look["bar"]["color"], look["style"]["broken"]["color"], look["range"]["category"][0]]
    assert all(_contrast(c, ground) >= 3 for c in marks)


def _contrast(one: str, two: str) -> float:
    lights = sorted(map(_luminance, (one, two)))
    return (lights[1] + 0.05) / (lights[0] + 0.05)


def _luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("count", [2, 7, 15])
def test_names_of_a_front_cover_neither_one_another_nor_a_point_at_any_width(count: int) -> None:
    points = [
        {"name": f"block_q={16 * n} depth={n}", "latency_us": 50 + n**1.5, "error": 3e-4 / n, "is_front": True}
        for n in range(1, count + 1)
    ]
    spec = charts.front(points)
    x, y = (spec["layer"][1]["encoding"][axis]["scale"]["domain"] for axis in "xy")
    names = spec["datasets"]["names"]
    for width in (250, 300, 640, 1100):
        at = {
            p["name"]: (
                width * (p["latency_us"] - x[0]) / (x[1] - x[0]),
                charts.CHART_HEIGHT * (1 - math.log(p["error"] / y[0]) / math.log(y[1] / y[0])),
            )
            for p in points
        }
        shown = [n for n in names if n["least"] <= width < n["beyond"]]
        assert shown, "the fastest at least has room"
        boxes = []
        for n in shown:
            length = charts.LETTER * len(n["name"])
            left = at[n["name"]][0] + n["dx"] - {"left": 0, "center": length / 2, "right": length}[n["align"]]
            boxes.append((left, at[n["name"]][1] + n["dy"], left + length))
        assert all(box[0] >= 0 and box[2] <= width for box in boxes)
        for one, two in combinations(boxes, 2):
            assert one[2] <= two[0] or two[2] <= one[0] or abs(one[1] - two[1]) >= 12
        for box in boxes:
            assert not any(box[0] < px < box[2] and abs(py - box[1]) < 8 for px, py in at.values())
            for (px, py), (end, _) in pairwise(at.values()):
                assert box[2] <= px or end <= box[0] or abs(py - box[1]) >= 6, "the front's line"


@pytest.mark.usefixtures("light")
def test_no_chart_has_a_width_of_its_own_and_every_table_scrolls_in_its_box(
    tmp_path: Path, computed: RunResult, drawn: dict[str, Any]
) -> None:
    pages = {"run": run_page(record_of(computed), drawn), **_other_pages(tmp_path, computed)}
    style = (page.TEMPLATES / "page.css").read_text(encoding="utf-8")
    assert not re.search(r"min-width:\s*(?:[4-9]\d\d|\d{4,})px", style)
    for name, text in pages.items():
        specs = json.loads(text.split('id="charts">')[1].split("</script>")[0])["charts"]
        assert specs, name
        assert all(spec["width"] == "container" for spec in specs.values()), name
        boxes = re.findall(r'<div class="scroll"[^>]*>\s*<(table|div class="chart")', text)
        assert len(boxes) == text.count("<table>") + text.count('class="chart"'), name


def _other_pages(folder: Path, computed: RunResult) -> dict[str, str]:
    """Return pages of a comparison and of a search with long names."""
    other = run("flash", seq=512, workload="pasa_uniform", precision="fa2_fp32", heads=[0])
    runs = [save_run(r, folder / name, trace=False) for name, r in (("a", computed), ("b", other))]
    request = Request("flash", seq=256, rows="sample", heads=[0])
    axes = {"block_q": (64, 128), "block_kv": (128, 256), "depth": (1, 2)}
    spec = SearchRequest(request, (request.schedule,)).spec(axes)
    search(spec, Options(jobs=1, store=folder / "found.sqlite", pareto=True, exhaustive=True))
    return {"compare": saved_page(runs), "explore": saved_page([folder / "found.sqlite"])}


@pytest.mark.usefixtures("light")
def test_the_page_of_a_search_says_what_was_searched(tmp_path: Path) -> None:
    table = tmp_path / "found.csv"
    spec = SearchRequest(Request("flash", seq=256, numerics=False), ("flash",)).spec({"depth": (1, 2)})
    search(spec, Options(jobs=1, store=table))
    texts = " ".join(_Reader(saved_page([table])).texts)
    assert "flash on ascend_910b2" in texts
    assert "pangu_38b B1 N5 S256 d128 causal float16; searched over depth; 2 points" in texts
    table.with_suffix(".sqlite").unlink()
    assert "2 points" in " ".join(_Reader(saved_page([table])).texts), "a table alone is shown too"


#: Says when a page is drawn which of its elements reach beyond it, out of no box that scrolls, which labels are cut,
#: and which lie over one another.
MEASURE = (Path(__file__).parent / "measure.js").read_text(encoding="utf-8")


@pytest.mark.exhaustive
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("name", ["run", "compare", "explore"])
def test_nothing_is_wider_than_its_page_and_no_label_is_cut_or_covered(
    tmp_path: Path, computed: RunResult, drawn: dict[str, Any], name: str, width: int
) -> None:
    pages = {"run": run_page(record_of(computed), drawn)} if name == "run" else _other_pages(tmp_path, computed)
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", pages[name])
    # A window has no fewer than 500 pixels: the page stands in a frame of the width, and tells what it measures.
    (tmp_path / "page.html").write_text(f"<script>{MEASURE}</script></body>".join(text.rsplit("</body>", 1)))
    heard = 'addEventListener("message", (e) => document.documentElement.setAttribute("data-measured", e.data))'
    frame = f'<iframe src="page.html" width="{width}" height="2000" style="border:0"></iframe>'
    (tmp_path / "frame.html").write_text(f"<!doctype html><body><script>{heard}</script>{frame}")
    dom = _browsed(tmp_path / "frame.html", tmp_path, f"--window-size={max(width, 500)},2000").stdout
    measured = json.loads(unescape(re.findall(r'data-measured="([^"]*)"', dom)[0]))
    assert measured == {"width": width, "reaches": width, "wide": [], "cut": [], "covered": []}


@pytest.mark.exhaustive
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_browser_draws_every_chart_without_an_error_or_a_request(
    tmp_path: Path, computed: RunResult, drawn: dict[str, Any], width: int, theme: str
) -> None:
    file, log = tmp_path / "page.html", tmp_path / "net.json"
    file.write_text(run_page(hostile(record_of(computed)), drawn), encoding="utf-8")
    assert file.stat().st_size < 2_000_000
    scheme = f"--blink-settings=preferredColorScheme={0 if theme == 'dark' else 1}"
    done = _browsed(file, tmp_path, f"--window-size={width},3000", scheme, f"--log-net-log={log}")
    assert "CONSOLE" not in done.stderr
    assert re.search(r'<html[^>]* class="drawn done"', done.stdout)
    seen = re.sub(r"<script.*?</script>", "", done.stdout, flags=re.S)
    charts = [d for d in _Reader(seen).all("div") if "data-chart" in d]
    assert charts
    assert len(re.findall(r'<svg[^>]* class="marks"', seen)) == len(charts)
    assert not _Reader(seen).all("img")
    own = re.compile(r"https?://[^/]*\.(google|googleapis|gvt1)\.com/")  # the browser's, whatever it opens
    requests = set(re.findall(r'"url":"((?!data:)[^"]+)"', log.read_text(encoding="utf-8", errors="replace")))
    assert {r for r in requests if not own.match(r) and r.startswith(("http", "ws", "file"))} <= {f"file://{file}"}


def _browsed(file: Path, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Return what Chromium makes of a page once it is drawn; skip where there is no Chromium."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium here: pages were not drawn")
    fixed = [
        "--headless",
        "--hide-scrollbars",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-background-networking",
    ]
    fixed += ["--disable-component-update", f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=20000"]
    words = [browser, *fixed, "--enable-logging=stderr", *options, "--dump-dom", f"file://{file}"]
    return subprocess.run(words, capture_output=True, text=True, check=True, timeout=900)
