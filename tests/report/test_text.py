from __future__ import annotations

from npusim.report.text import Cell, Facts, Grid, Heading, cells, lines, plain, pre_html

BLOCKS = (
    Heading("flash", "ascend"),
    Facts((("latency", cells("1 us")), ("bits", cells("a", "b")))),
    Grid(("pipe", "busy"), "<>", (cells("CUBE", "9 %"), cells("MTE2", "10 %"))),
    Facts((("advice", (Cell("none", "good"),)),)),
)


def test_plain_text_aligns_labels_and_columns_and_sets_grids_apart() -> None:
    assert plain(BLOCKS) == (
        "flash   ascend\n"
        "  latency  1 us\n"
        "  bits     a\n"
        "           b\n"
        "\n"
        "  pipe  busy\n"
        "  CUBE   9 %\n"
        "  MTE2  10 %\n"
        "\n"
        "  advice  none\n"
    )


def test_styled_lines_have_the_words_of_the_plain_text() -> None:
    styled = ["".join(text for text, _ in line).rstrip() for line in lines(BLOCKS)]
    assert styled == plain(BLOCKS).splitlines()


def test_html_is_escaped() -> None:
    assert "&lt;b&gt;" in pre_html([Heading("<b>")])


def test_grid_without_rows_is_its_header() -> None:
    assert plain([Grid(("a", "b"), "<<", ())]) == "  a  b\n"
