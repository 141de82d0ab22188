"""Documents in Markdown and HTML."""

from __future__ import annotations

from fsdp_advisor.render.document import Code, Heading, Items, Paragraph, Table, to_html, to_markdown

TABLE = Table(["name", "GiB"], [["a|b", "1.00"], ["<c>", "2.00"]], [False, True])


def test_a_table_in_markdown_aligns_numbers_and_escapes_bars() -> None:
    assert to_markdown([TABLE]).splitlines() == [
        "| name | GiB |",
        "| --- | ---: |",
        "| a\\|b | 1.00 |",
        "| <c> | 2.00 |",
    ]


def test_names_are_not_read_as_markup() -> None:
    blocks = [Heading("a_b"), Paragraph("<script>*x*"), Items(("x_y", "z"), nested=True), Code("--a_b", "sh")]
    assert to_markdown(blocks) == "**a\\_b**\n\n\\<script>\\*x\\*\n\n- x\\_y\n  - z\n\n```sh\n--a_b\n```"
    assert to_html([Paragraph("<script>"), Code("a<b")]) == "<div><p>&lt;script&gt;</p><pre>a&lt;b</pre></div>"


def test_nested_items_in_html_close_what_they_open() -> None:
    assert to_html([Items(("a", "b"), nested=True)]) == "<div><ul><li>a<ul><li>b</li></ul></li></ul></div>"
    assert to_html([Items(("a", "b"))]) == "<div><ul><li>a</li><li>b</li></ul></div>"
