"""A chat template is a program of somebody else's: it takes neither all time nor all memory, and ends in a line."""

import os
import resource
import subprocess
import sys

import pytest

from jaxscale.runtime.text.chat import template
from jaxscale.runtime.text.chat.template import TemplateProcess, compile_template
from jaxscale.system.exits import BadInput

pytest.importorskip("jinja2", reason="the extra chat")
pytestmark = pytest.mark.fault("H17")
MESSAGES = [{"role": "user", "content": "x"}]
GROW = "{% set ns = namespace(x=START) %}{% for i in range(60) %}{% set ns.x = ns.x STEP ns.x %}{% endfor %}{{ ns.x }}"
HUNGRY = {
    "a product": "{{ 'a' * 10**10 }}",
    "a format": "{{ '%10000000000d' % 1 }}",
    "a method": "{{ 'a'.center(10**10) }}",
    "text that doubles": GROW.replace("START", "'a'").replace("STEP", "~"),
    "a list that doubles": GROW.replace("START", "messages").replace("STEP", "+"),
    "text without end": "{% for i in range(99999) %}{{ 'a' * 99999 }}{% endfor %}",
}
SLOW = {
    "a large power": "{{ 7**(10**9) }}",
    "loops in loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "words without end": "{{ lipsum(n=10**9)|length }}",
}
WRONG = {
    "a long range": ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
    "calls without end": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "maximum recursion depth"),
    "brackets without end": (
        "{{ " + "(" * 99999 + "1" + ")" * 99999 + " }}",
        "is not a valid chat template: maximum recursion",
    ),
    "what the sandbox forbids": ("{{ ''.__class__.__mro__ }}", "access to attribute '__class__'"),
    "a division by zero": ("{{ 1 / 0 }}", "division by zero"),
}


@pytest.fixture
def templates(monkeypatch):
    """A process of this test alone, with little time."""
    monkeypatch.setattr(template, "SECONDS", 0.5)
    monkeypatch.setattr(template, "TEMPLATES", TemplateProcess())
    yield template.TEMPLATES
    template.TEMPLATES.end()


def write(source, messages=MESSAGES):
    return compile_template(source, "t.jinja", {}, {}, "")(messages, None, True)


@pytest.mark.cases(2)
@pytest.mark.parametrize("source", HUNGRY.values(), ids=HUNGRY)
def test_a_template_does_not_take_all_memory(templates, source):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(BadInput, match="t.jinja.*: it (needs too much memory|takes more than)") as caught:
        write(source)
    assert "\n" not in str(caught.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kB, in this process
    assert write("{{ messages[0].content }}") == "x"


@pytest.mark.cases(1)
@pytest.mark.parametrize("source", SLOW.values(), ids=SLOW)
def test_a_template_does_not_take_all_time(templates, source):
    with pytest.raises(BadInput, match="t.jinja.*: it takes more than"):
        write(source)
    assert write("{{ messages[0].content }}") == "x"


@pytest.mark.cases(1)
@pytest.mark.parametrize("how", ["ignored", "blocked"])
def test_time_is_bounded_where_the_signal_is_not_wanted(how):
    """As where libtpu is loaded: what a process ignores or blocks, its children do too.

    In a process of its own: in this one a library's profiler may use the signal, and its default action is to end.
    """
    ignored = "signal.signal(signal.SIGPROF, signal.SIG_IGN)"
    blocked = "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPROF})"
    code = f"import signal; {dict(ignored=ignored, blocked=blocked)[how]}\n"
    code += "import jaxscale.runtime.text.chat.template as t\nt.SECONDS, t.WAIT_SECONDS = 0.5, 20.0\n"
    code += f"t.compile_template({SLOW['loops in loops']!r}, 't.jinja', {{}}, {{}}, '')({MESSAGES!r}, None, True)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (
        done.returncode == 1
        and "BadInput: cannot be rendered by the template t.jinja: it takes more than 0.5 s" in done.stderr
    )


@pytest.mark.parametrize(("source", "told"), WRONG.values(), ids=WRONG)
def test_what_a_template_does_wrong_is_one_line(templates, source, told):
    with pytest.raises(BadInput, match=told) as caught:
        write(source)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1200


def test_many_templates_share_one_process_which_comes_back_when_it_was_killed(templates):
    one, other = (compile_template(f"{text}{{{{ messages[0].content }}}}", text, {}, {}, "") for text in "ab")
    process = templates.process
    assert one(MESSAGES, None, True) == "ax" and other(MESSAGES, None, True) == "bx" and templates.process is process
    os.kill(process.pid, 9)
    with pytest.raises(BadInput, match="its process exited with code -9"):
        one(MESSAGES, None, True)
    assert one(MESSAGES, None, True) == "ax" and templates.process is not process


def test_long_texts_and_half_pairs_go_through(templates):
    text = "é\ud800\x00\n" * 300_000
    assert write("{{ messages[0].content }}", [{"role": "user", "content": text}]) == text


def test_a_template_sees_no_secret_of_the_environment(templates, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_canary")
    templates.start()
    with open(f"/proc/{templates.process.pid}/environ", "rb") as file:
        assert b"canary" not in file.read()
