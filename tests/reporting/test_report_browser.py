"""The page in a real browser: nothing in the console, nothing too wide, and what a model wrote is text.

JAXSCALE_SCREENSHOTS=docs makes the pictures of docs/report.md anew.
"""

import dataclasses
import os
import pathlib

import pytest
from headless import BROWSER, Browser
from made_run import CANARY, make_run, written_at

from jaxscale.runtime.monitor.history import read_history
from jaxscale.tools.reporting.page import make_page

pytestmark = pytest.mark.skipif(BROWSER is None, reason="there is no chromium here to open the page in")
TOO_WIDE = """[...document.querySelectorAll('body *')].filter(e => {
  if (e.closest('.table') || e.closest('svg')) return false;
  const box = e.getBoundingClientRect();
  return box.width > 0 && (box.right > innerWidth + 1 || box.left < -1);
}).map(e => e.tagName + '.' + e.className + ' ' + e.textContent.slice(0, 40))"""
LABELS_THAT_TOUCH = """[...document.querySelectorAll('.area')].flatMap(area => {
  const labels = [...area.querySelectorAll('.tx,.xn,.ty')].map(e => [e.textContent, e.getBoundingClientRect()]);
  const touch = (a, b) => a.left < b.right + 2 && b.left < a.right + 2 && a.top < b.bottom && b.top < a.bottom;
  return labels.flatMap(([text, box], i) => labels.slice(i + 1).filter(other => touch(box, other[1])).map(
    other => [area.parentElement.textContent.slice(0, 20), text, other[0]]));
})"""
# how each line of a plot, and each piece of a line in its legend, is stroked; a faint one is of the line over it
STROKES = """[...document.querySelectorAll('.plot:not(.heat)')].map(figure => {
  const look = path => (s => [s.stroke, s.strokeDasharray, s.strokeWidth].join(' '))(getComputedStyle(path));
  const looks = names => [...new Set([...figure.querySelectorAll(names)].map(look))].sort();
  const lines = figure.querySelector('.key') ? looks('.area :is(.line, .dash, .limit)') : [];
  return [lines, looks('.legend :is(.line, .dash, .limit)')];
})"""
THIN_POINTS = """[...document.querySelectorAll('.area path')].filter(
  e => /^M[^ML]*h0$/.test(e.getAttribute('d')) && parseFloat(getComputedStyle(e).strokeWidth) < 4).length"""
HALF = """[...document.querySelectorAll('.plots')].flatMap(plots => [...plots.children].filter(one => {
  const box = one.getBoundingClientRect(), all = plots.getBoundingClientRect();
  const beside = [...plots.children].some(e => e !== one && e.getBoundingClientRect().top === box.top);
  return box.width < 0.9 * all.width && (!beside || one.matches('.heat'));
}).map(one => one.textContent.slice(0, 30)))"""
PATHS = """[...document.querySelectorAll('.area svg')].map(
  svg => [...svg.querySelectorAll('.line')].map(line => line.getAttribute('d')).join())"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two runs and their pages, and a page of a sweep that has just begun."""
    top = tmp_path_factory.mktemp("report")
    one = dataclasses.replace(read_history(make_run(top / "1b-web")), workdir="runs/1b-web")
    other = read_history(make_run(top / "1b-hot", last=3400, seed=1, peak_lr=6e-4, floor=1.92, plain=True))
    (top / "one.html").write_text(make_page([one], price=4.2, now=written_at(4200) + 4))
    (top / "two.html").write_text(make_page([one, other], price=4.2, now=written_at(4200) + 4))
    name = "sweep-of-the-learning-rate-with-a-name-that-goes-on-and-on-peak_lr=0.000"
    many = [
        read_history(make_run(top / f"{name}{i}", last=60, seed=i, peak_lr=1e-4 * (i + 1), plain=True))
        for i in range(10)
    ]
    (top / "many.html").write_text(make_page(many, now=written_at(60)))
    return top


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    opened = Browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


@pytest.mark.slow
@pytest.mark.parametrize("width", [360, 768, 1280])
@pytest.mark.parametrize("name", ["one", "two", "many"])
def test_nothing_is_too_wide_and_the_console_is_silent(browser, folder, name, width):
    browser.open((folder / f"{name}.html").as_uri(), width=width)
    assert browser.ask("document.documentElement.scrollWidth") <= width
    assert browser.ask(TOO_WIDE) == [] and browser.ask(LABELS_THAT_TOUCH) == []
    assert browser.complaints() == []
    assert browser.ask("document.querySelectorAll('.area .line').length") > 10


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["one", "two", "many"])
def test_what_is_drawn_is_what_is_told(browser, folder, name):
    browser.open((folder / f"{name}.html").as_uri())
    names = "[...document.querySelectorAll('.area')].map(area => area.querySelector('.xn')?.textContent)"
    assert set(browser.ask(names)) == {"steps"}
    told = browser.ask("[...document.querySelectorAll('.plot')].map(e => e.querySelector('.unit').textContent)")
    data = browser.ask("JSON.parse(document.getElementById('plot-data').textContent).plots.map(p => [p.log, p.heat])")
    assert [text.endswith("logarithmic") for text in told] == [bool(log or heat) for log, heat in data]
    assert any(log for log, _ in data) and not all(log for log, _ in data)
    strokes = browser.ask(STROKES)
    assert all(drawn == legend for drawn, legend in strokes) and any(drawn for drawn, _ in strokes)
    assert browser.ask(HALF) == []
    if name == "many":  # more runs than colours, each of one validation so far
        assert len(strokes[0][0]) == 10
        assert browser.ask(THIN_POINTS) == 0
    if name != "one":
        assert browser.ask("document.querySelector('main h2').textContent") == "Settings that differ"
        heads = browser.ask("[...document.querySelectorAll('main section:first-child tr')].map(e => e.textContent)")
        assert any("optim.peak_lr" in head for head in heads)


def test_memory_is_told_in_powers_of_two_also_where_one_looks_closer(browser, folder):
    plot = "[...document.querySelectorAll('.plot')].find(e => e.textContent.startsWith('Host memory'))"
    ticks = f"[...{plot}.querySelectorAll('.ty')].map(e => e.textContent)"
    browser.open((folder / "one.html").as_uri())
    assert browser.ask(ticks) == ["0", "4 GiB", "8 GiB", "12 GiB", "16 GiB", "20 GiB", "24 GiB"]
    browser.ask(f"{plot}.querySelector('.area').focus()")
    browser.press("+")
    assert browser.ask(ticks) == ["0", "4 GiB", "8 GiB", "12 GiB", "16 GiB", "20 GiB"]
    rate = "[...document.querySelectorAll('.plot')].find(e => e.textContent.startsWith('Learning rate'))"
    rates = browser.ask(f"[...{rate}.querySelectorAll('.ty')].map(e => e.textContent)")
    assert all("e-" in text or text == "0" for text in rates)
    assert browser.ask(f"{plot}.querySelector('.xn').textContent") == "steps"


def test_a_page_asks_for_nothing_but_itself(browser, folder):
    browser.open((folder / "one.html").as_uri())
    assert browser.asked_for() == [(folder / "one.html").as_uri()]


def test_text_of_a_model_is_shown_as_text(browser, folder):
    browser.open((folder / "one.html").as_uri())
    shown = browser.ask("[...document.querySelectorAll('pre')].map(e => e.textContent).join()")
    assert "</script><img src=x onerror=document.title='OWNED'>red" in shown
    assert browser.ask("[document.images.length, document.title, document.scripts.length]") == [0, "1b-web", 2]
    assert "\x1b" in CANARY and "\x1b" not in shown and "\u202e" not in shown


def test_a_script_that_slipped_in_would_find_no_network(browser, folder):
    browser.open((folder / "one.html").as_uri())
    blocked = browser.ask("fetch('http://127.0.0.1:9/').then(() => 'sent', error => 'refused')")
    assert blocked == "refused"
    assert any("Content Security Policy" in str(line) for line in browser.complaints())


def test_dragging_looks_closer_in_all_plots_and_a_double_click_goes_back(browser, folder):
    browser.open((folder / "one.html").as_uri())
    before = browser.ask(PATHS)
    box = browser.ask("(b => [b.left, b.right, b.top + 60])(document.querySelector('.area').getBoundingClientRect())")
    browser.drag(box[0] + 0.3 * (box[1] - box[0]), box[0] + 0.4 * (box[1] - box[0]), box[2])
    after = browser.ask(PATHS)
    changed = [i for i, (old, new) in enumerate(zip(before, after)) if old and old != new]
    assert len(changed) == sum(map(bool, before))
    assert browser.ask("location.hash") == "#x=1800-2400"
    assert not browser.ask("document.getElementById('reset').hidden")
    browser.ask("document.querySelector('.area').dispatchEvent(new MouseEvent('dblclick'))")
    assert browser.ask("location.hash") == "" and browser.ask("document.getElementById('reset').hidden")
    assert browser.complaints() == []


def test_the_keyboard_tells_values_and_looks_closer(browser, folder):
    browser.open((folder / "one.html").as_uri())
    browser.ask("document.querySelector('.area').focus()")
    read = "document.querySelector('.readout').textContent"
    browser.press("ArrowRight")
    assert browser.ask(read).startswith("step 1: train ")
    browser.press("ArrowRight")
    assert browser.ask(read).startswith("step 10: train ")
    browser.press("+")
    assert browser.ask("location.hash").startswith("#x=0-")
    browser.press("Escape")
    assert browser.ask("location.hash") == ""
    assert browser.complaints() == []


def test_a_part_that_the_address_names_is_shown_at_once(browser, folder):
    browser.open((folder / "one.html").as_uri() + "#x=2200-2400")
    labels = browser.ask("[...document.querySelector('.area').querySelectorAll('.tx')].map(e => e.textContent)")
    assert labels[0] == "2,200" and labels[-1] == "2,400"


def test_dark_and_paper_have_their_own_ground(browser, folder):
    ground = "getComputedStyle(document.body).backgroundColor"
    address = (folder / "one.html").as_uri()
    browser.open(address)
    assert browser.ask(ground) == "rgb(255, 255, 255)"
    browser.open(address, dark=True)
    assert browser.ask(ground) == "rgb(20, 23, 26)"
    browser.open(address, dark=True, media="print", width=760)
    assert browser.ask(ground) == "rgb(255, 255, 255)"
    assert browser.ask("getComputedStyle(document.querySelector('nav')).display") == "none"
    assert browser.ask("document.documentElement.scrollWidth") <= 760


@pytest.mark.slow
def test_pictures_of_the_page_are_not_blank(browser, folder, tmp_path):
    keep = os.environ.get("JAXSCALE_SCREENSHOTS")
    in_docs = ("report", "report-dark", "report-compare")
    one, two = (folder / "one.html").as_uri(), (folder / "two.html").as_uri()
    views = {
        "report": (one, dict(width=1280), 1240),
        "report-dark": (one, dict(width=1280, dark=True), 1240),
        "report-phone": (one, dict(width=390), 1500),
        "report-compare": (two, dict(width=1280), 1100),
        "report-print": (one, dict(width=760, media="print"), 2200),
        "report-whole": (one, dict(width=1280), 5200),
    }
    for name, (address, how, height) in views.items():
        browser.open(address, **how)
        place = pathlib.Path(keep) if keep and name in in_docs else tmp_path
        browser.picture(place / f"{name}.png", height)
        assert (place / f"{name}.png").stat().st_size > 30_000
