"""Documents are dropped by their address: domains with all below them, beginnings of paths, words."""

import gzip

import pytest

from jaxscale.runtime.text.document import Document
from jaxscale.tools.corpus.curate.config import UrlConfig
from jaxscale.tools.corpus.curate.origin import LISTED, UNKNOWN, WORD, Blocklist, make_urls


def outcomes(urls, **settings):
    found = make_urls(UrlConfig(**settings))([Document("text", url=url) for url in urls])
    return [(outcome.reason, outcome.detail) for outcome in found]


def test_a_domain_stands_for_all_below_it_and_a_path_for_what_begins_so(tmp_path):
    (tmp_path / "domains").write_text(
        "# a remark\nbad.example\n0.0.0.0 www.ads.test # one of a hosts file\n||block.test^\n"
        "255.255.255.255 broadcasthost\nfe80::1%lo0 localhost\n"
    )
    with gzip.open(tmp_path / "urls.gz", "wt") as file:
        file.write("good.example/~worse/pages\nxn--bcher-kva.example\nblogs.example/?user=foo\n")
        file.write("good.example/1/2/3/4/5/6/7/8/9\n")
    urls = {
        "http://bad.example": "bad.example",
        "https://user@WWW.deep.Bad.Example.:8080/a?b=c#d": "bad.example",
        "http://notbad.example/": "",
        "http://bad.example.org/": "",
        "ads.test/x": "ads.test",
        "http://block.test/": "block.test",
        "http://good.example/~worse/pages/1.html": "good.example/~worse/pages",
        "http://www.good.example/~worse/pages?x": "good.example/~worse/pages",
        "http://good.example/~worse/pages2": "",
        "http://good.example/": "",
        "http://blogs.example/?user=foo": "blogs.example/?user=foo",
        "http://blogs.example/?user=bar": "",
        "http://blogs.example/": "",
        "http://good.example/1/2/3/4/5/6/7/8/9/10": "good.example/1/2/3/4/5/6/7/8/9",
        "http://bücher.example/": "xn--bcher-kva.example",
        "": "",
    }
    found = outcomes(urls, lists=(f"{tmp_path}/*",))
    assert [detail for _, detail in found] == list(urls.values())
    assert [reason for reason, _ in found] == [LISTED if hit else "" for hit in urls.values()]
    assert [Blocklist([str(tmp_path / name)]).depth for name in ("domains", "urls.gz")] == [0, 9]


def test_a_word_counts_as_a_whole_and_documents_without_an_address_are_kept_or_dropped(tmp_path):
    (tmp_path / "words").write_text("casino\nbet # both\n")
    urls = ["http://my-casino.example/", "http://a.example/BET_now", "http://alphabet.example/", ""]
    words = str(tmp_path / "words")
    assert outcomes(urls, words=words) == [(WORD, "casino"), (WORD, "bet"), ("", ""), ("", "")]
    assert outcomes(urls[2:], words=words, unknown="drop") == [("", ""), (UNKNOWN, "")]
    (tmp_path / "odd").write_text("free-stuff\n")
    with pytest.raises(ValueError, match="'free-stuff', which is not all letters and digits"):
        outcomes(urls, words=str(tmp_path / "odd"))


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"# nothing\n", "has no URLs"),
        (b"good.example\ntwo words\n", "line 2 is not a URL: 'two words'"),
        (b"\xff\xfe", "line 1 is not UTF-8"),
    ],
)
def test_a_list_that_is_none_is_refused_by_name(tmp_path, content, told):
    (tmp_path / "list").write_bytes(content)
    with pytest.raises(ValueError, match=told):
        outcomes(["http://a.example"], lists=(str(tmp_path / "list"),))
    with pytest.raises(ValueError, match="url_blocklist.lists=.*does not exist"):
        outcomes([], lists=(str(tmp_path / "none"),))
