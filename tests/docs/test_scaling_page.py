"""The interactive page computes what the planner computes, by mouse, keyboard and file, in a real browser."""

import json
import re
import sys

import pytest
from shell_blocks import ROOT

sys.path[:0] = [str(ROOT / "docs"), str(ROOT / "tests" / "monitor")]
from generators import scaling as generated  # noqa: E402
from headless import BROWSER, Browser  # noqa: E402

from jaxscale.tools.planning import cost, scaling  # noqa: E402

pytestmark = pytest.mark.skipif(BROWSER is None, reason="there is no chromium here to open the page in")

LATER = """new Promise(done => setTimeout(
  () => done(document.querySelector("[data-part=told]").textContent), 20))"""
AS_CASES = """(() => {
  const { trainFlops, optimalParams, optimalTokens, loss, tokensForLoss, chipHours } = scalingLaws
  return scalingData.cases.map(one => {
    const law = scalingData.laws[one.law], tokens = one.flops / trainFlops(one.params, 1)
    const value = loss(law, one.params, tokens), best = optimalParams(one.flops)
    return {
      tokens, loss: value, optimal_params: best, optimal_tokens: optimalTokens(best),
      half_size_tokens: tokensForLoss(law, one.params / 2, value), dollars: chipHours(one.flops, 312e12, 0.4) * 2,
    }
  })
})()"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The widget of docs/scaling_laws.md with its scripts, without the site around it."""
    folder = tmp_path_factory.mktemp("page")
    text = (ROOT / "docs" / "scaling_laws.md").read_text(encoding="utf-8")
    (widget,) = re.findall(r'<div class="scaling".*</script>', text, re.S)
    (folder / "assets").mkdir()
    for name in ("scaling_laws.js", "pages.css"):
        (folder / "assets" / name).write_text((ROOT / "docs" / "assets" / name).read_text(encoding="utf-8"))
    (folder / "assets" / "scaling_data.js").write_text(generated.script())
    head = '<!doctype html><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    head += '<link rel="stylesheet" href="assets/pages.css">'
    (folder / "page.html").write_text(head + widget, encoding="utf-8")
    law = dict(form="params", E=1.5, A=12.0, B=0.0, alpha=0.35, beta=0.0)
    (folder / "forecast.json").write_text(json.dumps({"law": law}))
    return folder / "page.html"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    opened = Browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


@pytest.mark.slow
def test_page_and_planner_agree(browser, page):
    browser.open(page.as_uri())
    found = browser.ask(AS_CASES)
    cases = generated.content()["cases"]
    assert len(found) == len(cases) == 10
    for got, case in zip(found, cases):
        for name, value in got.items():
            assert value == (None if case[name] is None else pytest.approx(case[name], rel=1e-9)), (name, case)


def test_the_lowest_point_is_lowest(browser, page):
    browser.open(page.as_uri())
    for name, law in generated.LAWS.items():
        lowest = browser.ask(f"scalingLaws.lowestParams(scalingData.laws.{name}, 1e23)")
        losses = [scaling.predicted_loss(one, 1e23 / 6 / one, law) for one in (lowest, 0.99 * lowest, 1.01 * lowest)]
        assert losses[0] == min(losses) and losses[0] < losses[1]


def test_the_cases_are_the_planners_own():
    case = next(one for one in generated.content()["cases"] if one["flops"] == 6e23 and one["law"] == "besiroglu")
    assert case["loss"] == pytest.approx(scaling.predicted_loss(7e10, 6e23 / 6 / 7e10))
    assert case["optimal_params"] == pytest.approx(70.7e9, rel=0.005)
    assert case["dollars"] == pytest.approx(2 * 6e23 / (0.4 * 312e12) / 3600 / cost.GOODPUT)


def values(browser):
    """Of the two sliders."""
    return browser.ask("['params', 'flops'].map(name => +document.querySelector(`[name=${name}]`).value)")


def choose(browser, name, value):
    """Sets a field as a person would."""
    field = f"document.querySelector('[name={name}]')"
    browser.ask(f"({field}.value = {value}, {field}.dispatchEvent(new Event('input', {{bubbles: true}})))")


def facts(browser):
    return browser.ask("document.querySelector('[data-part=facts]').innerText")


def test_keys_mouse_and_fields_move_the_point(browser, page):
    browser.open(page.as_uri())
    browser.ask("document.querySelector('svg').focus()")
    before = values(browser)
    browser.press("ArrowRight")
    browser.press("ArrowUp")
    after = values(browser)
    assert after == [pytest.approx(before[0] + 0.02), pytest.approx(before[1] + 0.05)]
    box = browser.ask("JSON.stringify(document.querySelector('svg').getBoundingClientRect())")
    left, top, width = (json.loads(box)[name] for name in ("left", "top", "width"))
    browser.drag(left + width * 0.5, left + width * 0.25, top + 60)
    assert browser.ask("+document.querySelector('[name=params]').value") < after[0] - 0.3
    was = facts(browser)
    choose(browser, "law", "'hoffmann'")
    assert facts(browser) != was and browser.complaints() == []


def test_a_chip_without_a_price_says_so(browser, page):
    browser.open(page.as_uri())
    choose(browser, "chip", "scalingData.chips.findIndex(chip => chip.price === null)")
    assert "no price known" in facts(browser)


def test_a_law_of_ones_own_is_read(browser, page):
    browser.open(page.as_uri())
    node = browser.call("DOM.getDocument")["root"]["nodeId"]
    field = browser.call("DOM.querySelector", nodeId=node, selector="[name=forecast]")["nodeId"]
    for name, told in (("forecast.json", "law fitted in params"), ("page.html", "is not a forecast.json")):
        browser.call("DOM.setFileInputFiles", nodeId=field, files=[str(page.parent / name)])
        for _ in range(100):
            said = browser.ask(LATER)
            if told in said:
                break
        assert told in said
    assert "the law has one term" in facts(browser)
    assert browser.ask("document.querySelector('[name=law]').value") == "own"


@pytest.mark.cases(1)
@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("dark", [False, True])
def test_it_fits_a_phone_and_is_silent(browser, page, width, dark):
    browser.open(page.as_uri(), width=width, dark=dark)
    assert browser.ask("document.documentElement.scrollWidth") <= width
    assert browser.complaints() == [] and all(url.startswith("file:") for url in browser.asked_for())
    assert browser.ask("document.querySelector('svg path.line').getAttribute('d').length") > 500
    assert "nats per token" in facts(browser)
