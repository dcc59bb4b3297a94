"""A person sees one line that fits, and nothing in the data can move their cursor."""

import io

import pytest

from jaxscale.runtime.monitor.console import Console, choose_style, printable


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def make_console(style, stream, total_steps=1000, width=200):
    clock = Clock()
    return Console(style, total_steps, stream, clock, lambda: width), clock


METRICS = {"loss": 2.3141, "tokens_per_second": 12345.0, "mfu": None, "learning_rate": 3e-4, "grad_norm": 0.92}


def test_a_plain_line_says_it_all():
    stream = io.StringIO()
    console, clock = make_console("lines", stream)
    console.metrics(100, METRICS)
    clock.now = 2.0
    console.metrics(120, METRICS | {"mfu": 0.412})
    assert stream.getvalue().splitlines() == [
        "step 100/1000  loss 2.314  12.3K tok/s  MFU n/a  lr 3.0e-04  grad 0.9200  eta ?",
        "step 120/1000  loss 2.314  12.3K tok/s  MFU 41.2%  lr 3.0e-04  grad 0.9200  eta 1m28s",
    ]


def test_the_time_to_go_is_that_of_the_tokens_where_batches_grow():
    stream = io.StringIO()
    console, clock = make_console("lines", stream)
    console.tokens_after = lambda step: step if step <= 200 else 200 + 4 * (step - 200)
    console.metrics(100, METRICS)
    clock.now = 2.0
    console.metrics(120, METRICS)
    assert stream.getvalue().splitlines()[1].endswith("eta 5m28s")  # 80 steps of 0.1 s and 800 of 0.4 s


def test_validation_has_a_line_of_its_own():
    stream = io.StringIO()
    console, _ = make_console("lines", stream)
    console.metrics(50, {"validation/loss": 2.0, "validation/bits_per_byte": 1.25, "validation_seconds": 3.0})
    assert stream.getvalue() == "step 50/1000  validation  loss 2.000  bits_per_byte 1.250\n"


def test_a_stream_that_was_closed_ends_nothing():
    stream = io.StringIO()
    console, _ = make_console("lines", stream)
    stream.close()
    console.say("saved")
    console.metrics(100, METRICS)


def test_the_bar_stays_on_one_line_below_the_messages():
    stream = Terminal()
    console, clock = make_console("bar", stream, width=60)
    console.metrics(500, METRICS)
    console.say("saved")
    console.close()
    bar = stream.getvalue().split("\r")[1].split("\x1b")[0]
    assert len(bar) < 60 and "500/1000" in bar and "loss 2.314" in bar
    assert stream.getvalue().endswith(f"\r\x1b[Ksaved\n{bar}\n")


def test_ticks_draw_at_most_ten_times_a_second():
    stream = Terminal()
    console, clock = make_console("bar", stream)
    for step in range(1, 101):
        clock.now = step * 0.01
        console.tick(step)
    assert stream.getvalue().count("\r") <= 11


def test_plain_lines_ignore_ticks_and_off_is_silent_but_for_messages():
    stream = io.StringIO()
    make_console("lines", stream)[0].tick(5)
    console, _ = make_console("off", stream)
    console.metrics(1, METRICS | {"validation/loss": 1.0})
    console.close()
    assert stream.getvalue() == ""
    console.say("important")
    assert stream.getvalue() == "important\n"


def test_a_bar_only_on_a_terminal_that_can_show_one(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    assert choose_style("auto", Terminal()) == "bar"
    assert choose_style("auto", io.StringIO()) == "lines"
    assert choose_style("lines", Terminal()) == "lines"
    monkeypatch.setenv("TERM", "dumb")
    assert choose_style("auto", Terminal()) == "lines"


@pytest.mark.fault("H13")
@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07text", "text"),
        ("\x1b]8;;http://x\x1b\\link", "link"),
        ("a\x07\x08\x00\x9b31mb", "a31mb"),
        ("right\u202eleft", "rightleft"),
        ("line\r\nnext\tcolumn\roverwrite", "line\nnext\tcolumnoverwrite"),
        ("naïve 漢字 🙂", "naïve 漢字 🙂"),
        ("half \ud800 surrogate", "half  surrogate"),
        ("ends in \x1b", "ends in "),
    ],
)
def test_text_from_data_cannot_drive_the_terminal(raw, shown):
    assert printable(raw) == shown


def test_a_reader_that_went_away_does_not_end_the_run():
    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    console, _ = make_console("lines", Gone())
    console.metrics(1, METRICS)
    console.say("still here")


def test_a_stream_without_unicode_gets_question_marks():
    raw = io.BytesIO()
    console, _ = make_console("lines", io.TextIOWrapper(raw, encoding="ascii"))
    console.say("漢")
    assert raw.getvalue() == b"?\n"


def test_a_speed_that_is_not_known_is_not_available():
    stream = io.StringIO()
    make_console("lines", stream)[0].metrics(1, METRICS | {"tokens_per_second": None})
    assert "  n/a tok/s  MFU n/a" in stream.getvalue()
