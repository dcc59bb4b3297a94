"""Progress in a notebook: one output that is drawn anew, and plain lines around it."""

import io
import sys
import types

from jaxscale.runtime.monitor import console as notebook
from jaxscale.runtime.monitor.console import Console, choose_style


class Cell:
    """The outputs of a cell: each is what it shows last."""

    def __init__(self):
        self.outputs, self.drawn = [], 0

    def display(self, shown, raw, display_id):
        assert raw and display_id is True
        self.outputs.append(shown)
        return self

    def update(self, shown, raw):
        self.outputs[-1], self.drawn = shown, self.drawn + 1


def make_console(total=10):
    cell, stream, now = Cell(), io.StringIO(), [0.0]
    console = notebook.NotebookConsole(cell.display, total, stream, lambda: now[0])
    return cell, stream, now, console


def test_the_bar_moves_in_its_place_and_messages_are_lines_beside_it():
    cell, stream, now, console = make_console()
    for step in range(1, 11):
        now[0] += 1.0
        console.tick(step)
        if step % 5 == 0:
            console.metrics(step, {"loss": 2.0 - step / 10, "tokens_per_second": 1e4, "mfu": None})
    console.say("saved \x1b[2J step 10")
    console.close()
    (bar,) = cell.outputs
    assert 'value="1.0000"' in bar["text/html"] and "10/10" in bar["text/plain"] and "loss 1.000" in bar["text/plain"]
    assert "in 10.0s" in bar["text/plain"], bar
    assert "saved" in stream.getvalue() and "\x1b" not in stream.getvalue() and "\r" not in stream.getvalue()


def test_it_is_drawn_a_few_times_a_second_at_most():
    cell, _, now, console = make_console(1000)
    for step in range(1000):
        now[0] += 0.01
        console.tick(step)
    assert 35 <= cell.drawn <= 41


def test_what_is_shown_cannot_be_html_of_somebody_else():
    cell, _, _, console = make_console()
    console.metrics(1, {"loss": "<b>x</b>"})
    (bar,) = cell.outputs
    assert "<b>" in bar["text/plain"] and "<b>" not in bar["text/html"]


def fake_ipython(kernel):
    shell = types.SimpleNamespace(kernel=kernel)
    display = types.SimpleNamespace(display="the display")
    return types.SimpleNamespace(get_ipython=lambda: shell, display=display)


def test_a_notebook_is_told_from_a_terminal_and_from_a_script(monkeypatch):
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert notebook.find_display() is None
    monkeypatch.setitem(sys.modules, "IPython", fake_ipython(kernel=None))  # `ipython` in a terminal
    assert notebook.find_display() is None and type(notebook.open_console("bar", 1, io.StringIO())) is Console
    monkeypatch.setitem(sys.modules, "IPython", fake_ipython(kernel=object()))
    assert notebook.find_display() == "the display"
    assert type(notebook.open_console("bar", 1, io.StringIO())) is notebook.NotebookConsole
    assert type(notebook.open_console("lines", 1, io.StringIO())) is Console


def test_a_notebook_has_a_bar_unless_the_setting_says_otherwise():
    assert choose_style("auto", io.StringIO(), notebook=True) == "bar"
    assert choose_style("lines", io.StringIO(), notebook=True) == "lines"
    assert choose_style("auto", io.StringIO()) == "lines"
