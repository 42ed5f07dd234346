"""The drawing of what is simulated: kernel, tile program, a core group's buffers and paths, bits and cycles."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from html import escape

from npusim.config.load import load_device
from npusim.units import format_bytes

__all__ = ["badge", "drawing"]

WIDTH, HEIGHT = 980, 600
#: Size of the drawing for narrow screens, where the parts are below one another.
NARROW_WIDTH, NARROW_HEIGHT = 400, 1144
#: The ground is drawn too, so that the picture can be read on a white page and on a dark one.
STYLE = """
:root { --ground: #ffffff; --card: #f3f5f8; --ink: #16191d; --soft: #4d5560; --line: #aab2bd; --bits: #0b62a4;
  --time: #b35a00; --unit: #e4eef8; --buffer: #fdf1dd; }
@media (prefers-color-scheme: dark) { :root { --ground: #14181d; --card: #1f252d; --ink: #f0f2f4; --soft: #b9c0ca;
  --line: #66707c; --bits: #7cbcff; --time: #f2b45a; --unit: #1d3347; --buffer: #3a2f1c; } }
text { font: 13px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; fill: var(--ink); }
.title { font-size: 15px; font-weight: 600; } .soft { fill: var(--soft); font-size: 12px; }
.bits { fill: var(--bits); font-weight: 600; } .time { fill: var(--time); font-weight: 600; }
.ground { fill: var(--ground); } .card { fill: var(--card); stroke: var(--line); }
.unit { fill: var(--unit); stroke: var(--bits); } .buffer { fill: var(--buffer); stroke: var(--time); }
.group { fill: none; stroke: var(--line); stroke-dasharray: 5 4; }
.path { stroke: var(--ink); stroke-width: 1.6; fill: none; marker-end: url(#tip); }
"""
#: The same as attributes, in the light colours: a style sheet outranks them, and a renderer without one reads them.
INK = "#16191d"
ATTRIBUTES = {
    "title": {"font-size": "15", "font-weight": "600"},
    "soft": {"fill": "#4d5560", "font-size": "12"},
    "bits": {"fill": "#0b62a4", "font-weight": "600"},
    "time": {"fill": "#b35a00", "font-weight": "600"},
    "card": {"fill": "#f3f5f8", "stroke": "#aab2bd"},
    "unit": {"fill": "#e4eef8", "stroke": "#0b62a4"},
    "buffer": {"fill": "#fdf1dd", "stroke": "#b35a00"},
    "group": {"fill": "none", "stroke": "#aab2bd", "stroke-dasharray": "5 4"},
    "path": {"stroke": INK, "stroke-width": "1.6", "fill": "none", "marker-end": "url(#tip)"},
}


KERNEL = "a plain function on tiles, or Triton:", "s = q @ k.T;  p = exp(s - m)", "o = o * alpha + p @ v"
PROGRAM = (
    "operations on tiles, in queues;",
    "rings of buffer slots between queues;",
    "a check proves that no wait is missing",
)
DEVICE_FILE = (
    "rates, latencies, capacities, and",
    "the arithmetic of each unit; every",
    "number has a basis and a source",
)
BITS = (
    "each operation computes its tile in the unit's arithmetic:",
    "formats, order of sums, rounding, exponential.",
    "Output bits, error against float64, first NaN and its step.",
)
CYCLES = (
    "each operation occupies its unit for a time, and waits",
    "for data, for a free slot, or for its share of a link.",
    "Latency, each unit's time by cause, the limit, a timeline.",
)


def drawing(device_name: str, *, is_narrow: bool = False) -> str:
    """Return the drawing as SVG text; capacities and counts are those of an Ascend device's file.

    ``is_narrow``: for screens of telephones.
    """
    device = load_device(device_name)
    cube, vector = device.cores["aic"], device.cores["aiv"]
    size = {
        name: format_bytes(int(buffer.capacity_bytes.value))
        for core in (cube, vector)
        for name, buffer in core.buffers.items()
    }
    group = f"one of {int(device.group_count.value)} core groups ({device_name})"
    vectors = f"{int(vector.per_group_count.value)} vector cores"
    wide = [*_description(), *_memories(), *_cube(size), *_vector(size, vectors), *_results()]
    parts = _narrow(size, vectors, group) if is_narrow else [*wide, _text(302, 178, group, "soft")]
    width, height = (NARROW_WIDTH, NARROW_HEIGHT) if is_narrow else (WIDTH, HEIGHT)
    tip = (
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto-start-reverse"><path d="M0 0L8 4L0 8z" fill="#16191d" style="fill:var(--ink)"/></marker></defs>'
    )
    label = "What npusim simulates: a kernel becomes a tile program, which gives bits and cycles on a device"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{label}">'
    ground = f'<rect class="ground" fill="#ffffff" width="{width}" height="{height}" rx="10"/>'
    group = f'<g fill="{INK}" font-size="13" font-family="system-ui, sans-serif">'
    drawn = [ground, group, *map(_with_attributes, parts), "</g>", "</svg>"]
    return "\n".join([head, f"<style>{STYLE}</style>", tip, *drawn]) + "\n"


def _with_attributes(part: str) -> str:
    """Return elements with the attributes of their classes, for renderers that ignore the style sheet."""
    return re.sub(r'class="(\w+)"', lambda found: f"{found[0]}{_attributes(found[1])}", part)


def _attributes(name: str) -> str:
    return "".join(f' {key}="{value}"' for key, value in ATTRIBUTES.get(name, {}).items())


def badge(name: str, value: str) -> str:
    """Return a badge as SVG text, with plain attributes alone."""
    left, right = (7 * len(text) + 12 for text in (name, value))
    font = 'font-family="system-ui, sans-serif" font-size="12" fill="#ffffff" text-anchor="middle"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="20" role="img" '
        f'aria-label="{escape(name)}: {escape(value)}">\n'
        f'<rect width="{left + right}" height="20" rx="3" fill="#0b62a4"/>\n'
        f'<rect width="{left}" height="20" rx="3" fill="#4d5560"/>\n'
        f'<text x="{left / 2}" y="14" {font}>{escape(name)}</text>\n'
        f'<text x="{left + right / 2}" y="14" {font}>{escape(value)}</text>\n</svg>\n'
    )


def _description() -> list[str]:
    return [
        _card(20, 18, 270, 104, "Kernel", *KERNEL),
        _path("M290 70H352"),
        _card(356, 18, 290, 104, "Tile program", *PROGRAM),
        _path("M690 70H650"),
        _card(694, 18, 266, 104, "Device file", *DEVICE_FILE),
        _path("M501 122V156"),
    ]


def _memories() -> list[str]:
    return [
        '<rect class="card" x="20" y="160" width="940" height="262" rx="8"/>',
        _box(36, 192, 66, 214, "HBM", "buffer"),
        _box(150, 192, 66, 214, "L2", "buffer"),
        _path("M102 299H146", both=True),
        _text(106, 291, "link", "soft"),
        '<rect class="group" x="290" y="186" width="656" height="226" rx="8"/>',
    ]


def _cube(size: dict[str, str]) -> list[str]:
    return [
        _text(302, 206, "cube core", "title"),
        _path("M216 236H352"),
        _text(222, 228, "MTE2: Q K V", "soft"),
        _box(356, 214, 92, 46, f"L1\n{size['L1']}", "buffer"),
        _path("M448 237H512"),
        _text(460, 229, "MTE1", "soft"),
        _box(516, 214, 104, 46, f"L0A, L0B\n{size['L0A']} each", "buffer"),
        _path("M620 237H662"),
        _box(666, 214, 96, 46, "CUBE\nQ K^T, P V", "unit"),
        _path("M762 237H804"),
        _box(808, 214, 118, 46, f"L0C\n{size['L0C']}", "buffer"),
        _path("M867 260V290H220"),
        _text(560, 284, "FIXP: S and P V leave through L2", "soft"),
    ]


def _vector(size: dict[str, str], title: str) -> list[str]:
    return [
        _text(302, 318, title, "title"),
        _path("M216 346H512"),
        _text(300, 338, "MTE2: S, P V", "soft"),
        _box(516, 324, 104, 46, f"UB\n{size['UB']}", "buffer"),
        _path("M620 347H706", both=True),
        _box(710, 324, 160, 46, "VECTOR\nmax, exp, sum, rescale", "unit"),
        _path("M568 370V394H220"),
        _text(300, 388, "MTE3: P to the cube core, O to memory", "soft"),
    ]


def _results() -> list[str]:
    return [
        _path("M255 422V452"),
        _path("M725 422V452"),
        *_result(20, 456, 460, 122, "Bits", "bits", BITS),
        *_result(500, 456, 460, 122, "Cycles", "time", CYCLES),
    ]


def _narrow(size: dict[str, str], vectors: str, group: str) -> list[str]:
    """Return the parts below one another: the description, the memories and a core group, and the results."""
    bits, cycles = (textwrap.wrap(" ".join(lines), 46) for lines in (BITS, CYCLES))
    return [
        _card(28, 12, 360, 104, "Kernel", *KERNEL),
        _path("M28 64H14V304H24"),
        _card(28, 132, 360, 104, "Device file", *DEVICE_FILE),
        _path("M208 236V252"),
        _card(28, 256, 360, 104, "Tile program", *PROGRAM),
        _path("M208 360V396"),
        '<rect class="card" x="4" y="400" width="392" height="444" rx="8"/>',
        _box(14, 414, 372, 34, "HBM", "buffer"),
        _path("M200 452V476", both=True),
        _text(210, 468, "link", "soft"),
        _box(14, 480, 372, 34, "L2", "buffer"),
        '<rect class="group" x="34" y="548" width="332" height="284" rx="8"/>',
        _text(364, 540, group, "soft", "end"),
        _path("M98 514V578"),
        _text(106, 570, "MTE2: Q K V", "soft"),
        _text(354, 570, "cube core", "title", "end"),
        _box(46, 582, 104, 46, f"L1\n{size['L1']}", "buffer"),
        _path("M150 605H246"),
        _text(180, 597, "MTE1", "soft"),
        _box(250, 582, 104, 46, f"L0A, L0B\n{size['L0A']} each", "buffer"),
        _path("M302 628V652"),
        _box(250, 656, 104, 46, "CUBE\nQ K^T, P V", "unit"),
        _path("M250 679H154"),
        _box(46, 656, 104, 46, f"L0C\n{size['L0C']}", "buffer"),
        _path("M46 679H20V518"),
        _text(46, 717, "FIXP: S, P V", "soft"),
        _text(46, 746, vectors, "title"),
        _path("M380 514V777H358"),
        _text(354, 746, "MTE2: S, P V", "soft", "end"),
        _box(250, 754, 104, 46, f"UB\n{size['UB']}", "buffer"),
        _path("M246 777H204", both=True),
        _box(46, 754, 154, 46, "VECTOR\nmax, exp, sum, rescale", "unit"),
        _path("M302 800V822H20V518"),
        _text(46, 817, "MTE3: P to the cube core, O to memory", "soft"),
        _path("M110 844V864"),
        _path("M290 844V864"),
        *_result(4, 868, 392, 126, "Bits", "bits", bits),
        *_result(4, 1006, 392, 126, "Cycles", "time", cycles),
    ]


def _result(x: int, y: int, width: int, height: int, title: str, style: str, lines: Sequence[str]) -> list[str]:
    """Return a card whose title has its own style."""
    return [_card(x, y, width, height, "", *lines), _text(x + 16, y + 24, title, style)]


def _card(x: int, y: int, width: int, height: int, title: str, *lines: str) -> str:
    parts = [f'<rect class="card" x="{x}" y="{y}" width="{width}" height="{height}" rx="8"/>']
    parts += [_text(x + 16, y + 26, title, "title")] if title else []
    parts += [_text(x + 16, y + 50 + 21 * number, line) for number, line in enumerate(lines)]
    return "\n".join(parts)


def _box(x: int, y: int, width: int, height: int, text: str, kind: str) -> str:
    lines = text.split("\n")
    middle, first = x + width // 2, y + height // 2 + 5 - 9 * (len(lines) - 1)
    texts = [_text(middle, first + 18 * n, line, "soft" if n else "", "middle") for n, line in enumerate(lines)]
    return "\n".join([f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="5"/>', *texts])


def _text(x: int, y: int, text: str, kind: str = "", anchor: str = "") -> str:
    named = {"class": kind, "text-anchor": anchor}
    more = "".join(f' {name}="{value}"' for name, value in named.items() if value)
    return f'<text x="{x}" y="{y}"{more}>{escape(text, quote=False)}</text>'


def _path(along: str, *, both: bool = False) -> str:
    start = ' marker-start="url(#tip)"' if both else ""
    return f'<path class="path" d="{along}"{start}/>'
