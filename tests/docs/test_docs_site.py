"""The whole site is built strictly, opens from a disk without a network, and its search finds.

JAXSCALE_DOCS_PYTHON names a Python with the extra `docs`, if this one lacks it. JAXSCALE_SCREENSHOTS=FOLDER keeps
pictures.
"""

import json
import os
import pathlib
import subprocess
import sys

import pytest
from shell_blocks import ROOT

sys.path[:0] = [str(ROOT / "tests" / "monitor")]
from headless import BROWSER, Browser  # noqa: E402

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(BROWSER is None, reason="there is no chromium here to open the pages in"),
]
PYTHON = os.environ.get("JAXSCALE_DOCS_PYTHON", sys.executable)
SITE = ROOT / "build" / "site"
SHOWN = ("index", "tutorial", "scaling_laws", "reference/settings", "explanation/ten_questions", "reference/verbs/plan")
FIND = """(async () => {
  const wait = ms => new Promise(done => setTimeout(done, ms))
  const field = document.querySelector("[data-md-component=search-query]")
  field.focus()
  field.value = WORD
  for (let i = 0; i < 200; i++) {
    field.dispatchEvent(new Event("keyup"))
    await wait(100)
    const found = [...document.querySelectorAll(".md-search-result__link")].map(link => link.getAttribute("href"))
    if (found.length) return found
  }
  return []
})()"""


@pytest.fixture(scope="module")
def site():
    """What docs/build.py makes."""
    lacks = subprocess.run([PYTHON, "-c", "import material"], capture_output=True).returncode
    if lacks:
        pytest.skip("Material for MkDocs is not installed: pip install -e '.[docs]', or JAXSCALE_DOCS_PYTHON")
    command = [PYTHON, str(ROOT / "docs" / "build.py")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "built build/site/index.html" in done.stdout, done.stdout + done.stderr
    return SITE


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    opened = Browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


def test_every_page_opens_without_a_network_or_a_word_in_the_console(browser, site):
    pages = sorted(page for page in site.rglob("*.html") if page.name != "404.html")  # which is for servers alone
    assert len(pages) > 60
    for page in pages:
        browser.open(page.as_uri(), width=360)
        assert browser.complaints() == [], page.name
        assert all(url.startswith(("file:", "data:", "about:")) for url in browser.asked_for()), page.name
        assert browser.ask("document.documentElement.scrollWidth") <= 360, page.name


def test_nothing_in_the_pages_is_fetched_from_elsewhere(site):
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert '<script src="http' not in text and "fonts.g" not in text and "unpkg" not in text, page.name
        assert 'rel="stylesheet" href="http' not in text and '<img src="http' not in text, page.name


@pytest.mark.parametrize(
    ("word", "page"),
    [
        ("resume", "howto/resume_gs.html"),
        ("OOM", "howto/fit_memory.html"),
        ("out of memory", "howto/fit_memory.html"),
        ("MFU", "plan.html"),
        ("sharding", "explanation/parallelism.html"),
        ("tokenizer", "data.html"),
        ("fine-tune", "finetune.html"),
        ("mixture", "explanation/mixtures.html"),
        ("NaN", "autopilot.html"),
        ("learning rate", "howto/decay.html"),
    ],
)
def test_search_works_without_a_server_and_ranks_the_page_on_the_topic_first(browser, site, word, page):
    browser.open((site / "index.html").as_uri())
    found = browser.ask(FIND.replace("WORD", json.dumps(word)))
    assert f"/site/{page}" in found[0], found
    assert browser.complaints() == []


def test_no_number_is_left_open_and_dark_is_dark(browser, site):
    for page in (site / "explanation").glob("*.html"):
        assert "{{" not in page.read_text(encoding="utf-8"), page.name
    shades = []
    for dark in (False, True):
        browser.open((site / "index.html").as_uri(), dark=dark)
        shades.append(browser.ask("getComputedStyle(document.body).backgroundColor"))
    assert shades[0] != shades[1]


def test_pictures_are_kept_where_they_are_asked_for(browser, site):
    if not (wished := os.environ.get("JAXSCALE_SCREENSHOTS")):
        pytest.skip("JAXSCALE_SCREENSHOTS is not set")
    pathlib.Path(wished).mkdir(parents=True, exist_ok=True)
    for name in SHOWN:
        for kind, width, dark in (("desktop", 1280, False), ("dark", 1280, True), ("phone", 390, False)):
            browser.open((site / f"{name}.html").as_uri(), width=width, dark=dark)
            browser.picture(pathlib.Path(wished) / f"{name.replace('/', '-')}-{kind}.png", height=1600)
