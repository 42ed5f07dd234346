from __future__ import annotations

from npusim.report.text import Cell, Column, Columns, Facts, Grid, Heading, cells, lines, markdown, plain, pre_html

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


def test_a_table_declared_once_is_read_as_text_markdown_and_records() -> None:
    table = Columns(
        Column("pipe", "name", key="pipe"),
        Column("busy", lambda row: row["busy"] / 2, ".1f", ">", key="share"),
        Column(None, lambda row: row["busy"] > 1, key="is_long"),
    )
    rows = [{"name": "CUBE", "busy": 1}, {"name": None, "busy": 3}]
    assert plain([table.grid(rows)]) == "  pipe  busy\n  CUBE   0.5\n  -      1.5\n"
    assert markdown([table.grid(rows)]).splitlines()[2] == "| CUBE | 0.5 |"
    assert table.records(rows)[0] == {"pipe": "CUBE", "share": 0.5, "is_long": False}
    shown = Columns(Column("pipe", "name"), Column("half", "busy", key="half", json=lambda row: row["busy"] / 2))
    assert shown.records(rows) == [{"half": 0.5}, {"half": 1.5}]


def test_wrapped_text_hangs_under_where_it_began() -> None:
    facts = Facts((("one", (Cell("aaaa bbbb cccc dddd"), Cell("try: x y z w v u t s", whole=True))),))
    assert plain((facts,), 24) == ("  one  aaaa bbbb cccc\n       dddd\n       try: x y z w v u t s\n")
    assert plain((facts,)) == "  one  aaaa bbbb cccc dddd\n       try: x y z w v u t s\n"


def test_columns_of_text_give_room_and_numbers_do_not() -> None:
    rows = (cells("a", "1,000,000", "wait for the matrix unit"), cells("b", "2", "x"))
    grid = Grid(("name", "count", "what it does"), "<><", rows)
    assert plain((grid,), 36).splitlines() == [
        "  name      count  what it does",
        "  a     1,000,000  wait for the",
        "                   matrix unit",
        "  b             2  x",
    ]


def test_a_grid_that_is_too_wide_breaks_names_leaves_columns_out_and_goes_on_below() -> None:
    rows = (cells("1", "1,000", "7", "aiv0"), cells("2", "3", "8", "aic"))
    grid = Grid(("vector_rows", "latency us", "spare", "unit"), ">>><", rows, spare=("spare",))
    assert plain((grid,)).splitlines()[0] == "  vector_rows  latency us  spare  unit"
    assert plain((grid,), 32).splitlines() == [
        "  vector_  latency",
        "     rows       us  spare  unit",
        "        1    1,000      7  aiv0",
        "        2        3      8  aic",
    ]
    assert plain((grid,), 28).splitlines() == [
        "  vector_  latency",
        "     rows       us  unit",
        "        1    1,000  aiv0",
        "        2        3  aic",
        "  not shown at this width:",
        "  spare",
    ]
    assert plain((grid,), 20).splitlines()[:4] == [
        "  vector_  latency",
        "     rows       us",
        "    unit",
        "        1    1,000",
    ]
    assert all(len(line) <= width for width in range(20, 40) for line in plain((grid,), width).splitlines())


def test_a_long_heading_takes_lines_of_its_own() -> None:
    heading = Heading("flash on x", "a long description of it")
    assert plain((heading,), 60) == "flash on x   a long description of it\n"
    assert plain((heading,), 20) == "flash on x\na long description\nof it\n"


def test_words_in_a_column_of_numbers_are_wrapped_and_a_number_keeps_its_unit() -> None:
    rows = (cells("errors", "the kernel itself in float64"), cells("bytes", "22.0 MiB"), cells("change", "+56.6 %"))
    grid = Grid(("what", "run"), "<>", rows)
    shown = plain((grid,), 24).splitlines()
    assert all(len(line) <= 24 for line in shown)
    assert any(line.endswith("22.0 MiB") for line in shown)
    assert any(line.endswith("+56.6 %") for line in shown)
    assert not any("the kernel itself in float64" in line for line in shown)
