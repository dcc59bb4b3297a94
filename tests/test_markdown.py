"""Whatever a run, its model or its data wrote, Markdown shows it as it is: no reader makes anything of it."""

import html.parser

import markdown_it
import pytest

from jaxscale.system.redact import block_in_markdown, in_markdown, on_one_line

HOSTILE = [
    "<img src=x onerror=alert(1)>", "[a](javascript:alert(1))", "![i](http://e.example/x.png)", "<http://e.example>",
    "http://e.example/x www.e.example", "*b* _i_ __b__ `c` ~~s~~ bits_per_byte", "a|b \\| c \\", "# h #", "a\n\n# x",
    "\x1b[2Jx\u202edcba\u2028z\x85q", "&lt;b&gt; &amp; &#60;script>", "`a\\`b`", "a\"b'c<!-- x", "[a]: javascript:x",
    "<javascript:alert(1)>", "---", "```\n</td>", "$ 1. x",
]  # fmt: skip
READER = markdown_it.MarkdownIt().enable(["table", "strikethrough"])


class Seen(html.parser.HTMLParser):
    """The elements of a page, and its text."""

    def __init__(self, page):
        super().__init__()
        self.elements, self.text = [], ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.elements.append(tag if not attrs else (tag, *attrs))

    def handle_data(self, data):
        self.text += data


@pytest.mark.fault("H16")
@pytest.mark.parametrize("text", HOSTILE)
def test_a_text_in_a_heading_or_a_cell_is_shown_as_it_is(text):
    spelt = in_markdown(text)
    heading = Seen(READER.render(f"# {spelt}: end"))
    assert (heading.elements, heading.text) == (["h1"], f"{on_one_line(text)}: end\n")
    cells = Seen(READER.render(f"| a | b |\n|---|---|\n| {spelt} | end |\n"))
    assert cells.elements == ["table", "thead", "tr", "th", "th", "tbody", "tr", "td", "td"]
    assert f"\n{on_one_line(text)}\nend\n" in cells.text
    assert "://" not in spelt and "www." not in spelt  # what GitHub would make a link of
    assert spelt.isprintable()


@pytest.mark.fault("H16")
@pytest.mark.parametrize("text", [*HOSTILE, "\n\n  def f():\n\n\n\treturn <b>\n", "", "\n"])
def test_a_text_in_a_block_cannot_end_it(text):
    found = Seen(READER.render(f"# a\n\n{block_in_markdown(text)}\n\nend"))
    assert found.elements in (["h1", "pre", "code", "p"], ["h1", "p"]) and found.text.endswith("end\n")
    assert not set(found.text) - {"\n", "\t"} & set("\x1b\u202e\u2028\x85")
