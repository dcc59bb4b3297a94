"""The chat page in a real browser: what is said is text, a second tab waits, Stop and a closed tab end the writing.

JAXSCALE_SCREENSHOTS=FOLDER keeps pictures of it.
"""

import os
import pathlib
import sys
import threading
import time

import pytest

from jaxscale.runtime.sampling.chat_server import open_chat
from jaxscale.runtime.sampling.text_stream import GeneratedText
from jaxscale.system.exits import BadInput

sys.path[:0] = [str(pathlib.Path(__file__).parents[1] / "monitor")]
from headless import BROWSER, Browser  # noqa: E402

pytestmark = pytest.mark.skipif(BROWSER is None, reason="there is no chromium here to open the page in")
EVIL = "<script>document.title='run'</script><img src=x onerror=\"document.title='run'\">"
LONG = "a line that is longer than a phone is wide, and a_word_without_any_space_" + "x" * 200


class Model:
    """Answers by what it is told to do."""

    def __init__(self):
        self.ended, self.asked = threading.Event(), []

    def __call__(self, messages, written):
        self.asked.append([message["content"] for message in messages])
        written.append(GeneratedText(reason="end"))
        said = messages[-1]["content"]
        try:
            if said == "wrong":
                raise BadInput("this has 99 tokens")
            for piece in ("é", EVIL, "\n\n", LONG):
                written[0].tokens += 1
                yield piece
            while said == "endless":
                yield "x "
                time.sleep(0.02)
        finally:
            self.ended.set()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    opened = Browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


@pytest.fixture
def model(browser):
    """(the model, its page's address), the page open in the browser."""
    answer = Model()
    server = open_chat(answer, "runs/a-long-name/checkpoints/12000", 0, 64)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield answer, f"http://127.0.0.1:{server.server_address[1]}/"
    server.shutdown()
    server.server_close()


def until(browser, expression):
    """Waits for an expression to be true in the page."""
    for _ in range(500):
        if browser.ask(expression):
            return
        time.sleep(0.02)
    raise AssertionError(f"never true: {expression}; the page says {browser.ask('document.body.innerText')!r}")


def say(browser, text):
    browser.ask(f"(box.value = {text!r}, form.requestSubmit())")


TURNS = "[...document.querySelectorAll('.turn')].map(e => e.textContent)"
NOTE = "document.getElementById('note').textContent"


def picture(browser, name):
    if folder := os.environ.get("JAXSCALE_SCREENSHOTS"):
        browser.picture(pathlib.Path(folder) / f"chat_{name}.png")


@pytest.mark.cases(1)
@pytest.mark.parametrize("width, dark", [(1280, False), (360, True)])
def test_what_a_model_writes_is_text_and_fits_the_window(browser, model, width, dark):
    answer, address = model
    browser.open(address, width=width, dark=dark)
    say(browser, "<b>hi</b>")
    until(browser, f"{NOTE}.includes('tokens')")
    assert browser.ask(TURNS) == ["<b>hi</b>", f"é{EVIL}\n\n{LONG}"]
    assert browser.ask("document.title") == "jaxscale chat" and browser.ask("document.images.length") == 0
    assert browser.ask("document.documentElement.scrollWidth") <= width
    assert browser.ask(NOTE).startswith("4 tokens, ") and browser.ask("send.textContent") == "Send"
    say(browser, "wrong")
    until(browser, f"{NOTE} === 'this has 99 tokens'")
    assert browser.ask("box.value") == "wrong" and len(browser.ask(TURNS)) == 2  # to be changed and sent again
    say(browser, "again")
    until(browser, f"{TURNS}.length === 4 && send.textContent === 'Send'")
    assert answer.asked[-1] == ["<b>hi</b>", f"é{EVIL}\n\n{LONG}", "again"]
    seen = "document.getElementById('{}').getBoundingClientRect().{}"
    assert browser.ask(f"{seen.format('note', 'top')} > {seen.format('turns', 'top')}")
    assert browser.ask(f"{seen.format('note', 'bottom')} <= {seen.format('form', 'top')} + 1")  # the end is in sight
    assert browser.ask(f"{seen.format('form', 'bottom')} <= innerHeight + 1")
    picture(browser, f"{width}_{'dark' if dark else 'light'}")
    browser.ask("newChat.click()")
    assert browser.ask(TURNS) == []
    assert browser.complaints() == []
    assert {url for url in browser.asked_for() if not url.startswith(address)} <= {"about:blank"}


def test_stop_and_a_closed_tab_end_the_writing_and_a_second_question_waits(browser, model):
    answer, address = model
    browser.open(address)
    say(browser, "endless")
    until(browser, f"{TURNS}.at(-1).includes('x x x')")
    picture(browser, "writing")
    status = browser.ask(
        "fetch('/say', {method: 'POST', headers: {'Content-Type': 'application/json'},"
        "body: JSON.stringify({messages: [{role: 'user', content: 'hi'}]})}).then(r => r.status)"
    )
    assert status == 503 and browser.ask("send.textContent") == "Stop"
    browser.ask("form.requestSubmit()")
    until(browser, f"{NOTE} === 'stopped'")
    assert answer.ended.wait(10)
    answer.ended.clear()
    for _ in range(100):  # until the server has seen it
        say(browser, "endless")
        until(browser, f"send.textContent === 'Stop' || {NOTE}.includes('wait')")
        if browser.ask("send.textContent === 'Stop'"):
            break
    until(browser, f"{TURNS}.length === 4 && {TURNS}.at(-1).includes('x x')")
    assert len(answer.asked[-1]) == 3 and "x x" in answer.asked[-1][1]  # what was stopped stays in the conversation
    browser.call("Page.navigate", url="about:blank")
    assert answer.ended.wait(10)
