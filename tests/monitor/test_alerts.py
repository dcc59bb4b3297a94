"""A finding reaches the console, events.jsonl and a chat, and none of them can hold up a run or leak the address."""

import contextlib
import http.server
import io
import json
import threading
import time
import types

import pytest

from jaxscale.runtime.monitor.alerts import (
    MAX_PENDING,
    MAX_WAIT,
    VARIABLE,
    Diagnosis,
    Webhook,
    finding_to_json,
    format_line,
    format_message,
    read_facts,
    retry_after,
    webhook_url,
)
from jaxscale.runtime.monitor.config import HealthConfig, MonitorConfig
from jaxscale.runtime.monitor.events import Events, read_events
from jaxscale.runtime.monitor.health import Cause, Finding, RunFacts
from jaxscale.runtime.monitor.writers import Writer
from jaxscale.system import redact

SPIKE = Finding(
    "spike", 120, "the loss is 9 after 3", {"loss": 9.0, "ratio": float("inf")},
    (Cause("a bad batch", "batch 119"), Cause("the warmup", "ended long before")), ("look at the batch",), ("S2",),
)  # fmt: skip
OVER = SPIKE._replace(step=130, seen="the loss is back at 3", causes=(), advice=(), over=True)


@contextlib.contextmanager
def chat(answer):
    """(address, requests): a server on this machine; answer(number, handler) gives status and headers of each."""
    received = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.append((self.path, body, time.monotonic()))
            status, headers = answer(len(received), self)
            with contextlib.suppress(OSError):  # it may have hung up
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()

        do_GET = do_POST

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/services/T000/B000/secretpath", received
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def made_diagnosis(note, say, workdir="RUN", url=None):
    diagnosis = Diagnosis(HealthConfig(), RunFacts(workdir=workdir), note)
    diagnosis.url = url
    diagnosis.replay([], say)
    return diagnosis


def test_the_console_has_one_line_and_the_event_all_facts(tmp_path):
    said, events = [], Events(tmp_path, primary=True)
    alerts = made_diagnosis(events.note, said.append)
    alerts.report(SPIKE)
    alerts.report(OVER)
    events.close()
    assert said == [
        "health: step 120: spike: the loss is 9 after 3; likely: a bad batch (batch 119); try: look at the batch",
        "health: step 130: spike ended: the loss is back at 3",
    ]
    first, second = read_events(tmp_path)
    assert (first["event"], first["step"], first["what"], first["over"]) == ("alert", 120, "spike", False)
    assert first["numbers"] == {"loss": 9.0, "ratio": None}
    assert first["causes"][0] == {"what": "a bad batch", "evidence": "batch 119"} and len(first["causes"]) == 2
    assert first["advice"] == ["look at the batch"] and first["sources"] == ["S2"]
    assert second["over"] and second["causes"] == []


def test_a_chat_gets_the_message_as_text_without_markup():
    with chat(lambda number, handler: (200, {})) as (url, received):
        alerts = made_diagnosis(lambda *args, **facts: None, lambda text: None, "runs/<a>&b", url)
        alerts.report(SPIKE)
        alerts.close()
    ((path, body, _),) = received
    text = json.loads(body)["text"]
    assert path.endswith("secretpath") and set(json.loads(body)) == {"text"}
    assert text.endswith("\nThresholds: S2")
    assert text.startswith("runs/&lt;a&gt;&amp;b: spike at step 120: the loss is 9 after 3\nLikely causes, in order:\n")
    assert "- a bad batch: batch 119\n" in text and "\nWhat to try:\n- look at the batch\n" in text


@pytest.mark.parametrize("query", ["?chat_id=-100&parse_mode=HTML", "?:text=body"])  # Telegram, Apprise API
def test_the_query_of_an_address_is_sent_with_the_message(query):
    with chat(lambda number, handler: (200, {})) as (url, received):
        webhook = Webhook(webhook_url({VARIABLE: url + query}))
        webhook.post("loss < 9 & rising")
        webhook.close(5)
    assert webhook.take_problem() is None
    assert received[0][0].endswith(f"/secretpath{query}")
    assert json.loads(received[0][1]) == {"text": "loss &lt; 9 &amp; rising"}


def test_a_message_that_fails_is_tried_again_and_a_429_is_obeyed():
    answers = [(503, {}), (429, {"Retry-After": "0.4"}), (200, {})]
    with chat(lambda number, handler: answers[number - 1]) as (url, received):
        webhook = Webhook(url, first_wait=0.01)
        webhook.post("one")
        webhook.close(5)
    assert len(received) == 3 and webhook.take_problem() is None
    assert received[2][2] - received[1][2] >= 0.4


def test_what_asks_for_too_long_a_wait_or_none_that_can_be_read_gets_a_sane_one():
    assert retry_after("7", 0) == 7 and retry_after(None, 0) == 1 and retry_after("soon", 0) == 1
    assert retry_after("nan", 0) == 1 and retry_after("-3", 0) == 0 and retry_after("1e9", 0) == MAX_WAIT
    assert retry_after("Thu, 01 Jan 1970 00:00:30 GMT", 10) == 20


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_not_followed(status):
    with chat(lambda number, handler: (200, {})) as (elsewhere, followed):
        with chat(lambda number, handler: (status, {"Location": elsewhere})) as (url, received):
            webhook = Webhook(url, first_wait=0.01)
            webhook.post("one")
            webhook.close(5)
            assert len(received) == 1 and followed == []
            assert webhook.take_problem() == f"the server returned {status}, a redirect, which is not followed"
            assert webhook.take_problem() is None  # said once


def test_what_is_refused_is_not_tried_again_and_one_that_always_fails_not_for_ever():
    for status, tries in ((404, 1), (500, 6)):
        with chat(lambda number, handler: (status, {})) as (url, received):  # noqa: B023
            webhook = Webhook(url, first_wait=0.001)
            webhook.post("one")
            webhook.close(5)
        assert len(received) == tries and webhook.take_problem() == f"the server returned {status}"


def test_an_address_that_fails_is_complained_of_once_and_again_when_it_fails_after_it_was_well():
    statuses, said = [404, 404, 404, 200, 404], []
    with chat(lambda number, handler: (statuses[number - 1], {})) as (url, received):
        alerts = made_diagnosis(lambda *args, **facts: None, said.append, url=url)
        for number in range(len(statuses)):
            alerts.report(SPIKE)
            with alerts.webhook.changed:
                assert alerts.webhook.changed.wait_for(
                    lambda: not alerts.webhook.pending and not alerts.webhook.busy, 5
                )
            alerts.log_webhook_problem()
        alerts.close()
    assert len(received) == 5
    spoken = [number for number, line in enumerate(said) if line == "webhook: the server returned 404"]
    assert spoken == [1, 6] and len(said) == 7  # behind the first of five alerts, and behind the last


def test_nothing_waits_for_a_server_that_is_slow_or_away():
    release = threading.Event()
    with chat(lambda number, handler: (release.wait(20) and 200, {})) as (url, _):
        webhook = Webhook(url, timeout=30)
        began = time.monotonic()
        for number in range(MAX_PENDING + 50):
            webhook.post(str(number))
        assert time.monotonic() - began < 1
        assert len(webhook.pending) <= MAX_PENDING and "are dropped" in webhook.take_problem()
        webhook.close(0.1)
        assert time.monotonic() - began < 2 and "may be lost" in webhook.take_problem()
        release.set()
    away = Webhook("http://127.0.0.1:9/x", first_wait=0.001)
    away.post("one")
    away.close(10)
    assert away.take_problem() == "the server cannot be reached: Connection refused"


def test_the_address_comes_from_the_environment_and_must_be_private():
    assert webhook_url({}) is None and webhook_url({VARIABLE: " "}) is None
    for good in ("https://hooks.slack.com/services/x", "http://localhost:80/x", "http://[::1]:1/", "http://127.0.0.2/"):
        assert webhook_url({VARIABLE: good}) == good
    bad = ("http://chat.example/secretpath", "file:///etc/passwd", "https://", "ftp://127.0.0.1/secretpath", "https://[x",
           "https://a b/secretpath", "https://x:port/secretpath", "http://localhost.example/secretpath")  # fmt: skip
    for url in bad:
        with pytest.raises(ValueError, match="JAXSCALE_WEBHOOK_URL must be an https") as error:
            webhook_url({VARIABLE: url})
        assert "secretpath" not in str(error.value)


def test_the_address_is_redacted_wherever_it_might_be_written(monkeypatch):
    monkeypatch.setenv(VARIABLE, "https://chat.example/hooks/abcdef123456")
    assert redact.redact("see https://chat.example/hooks/abcdef123456 now") == "see [redacted] now"
    monkeypatch.delenv(VARIABLE)
    told = redact.redact("at https://hooks.slack.com/services/T00/B00/XXXX and https://discord.com/api/webhooks/1/abc.")
    assert "T00" not in told and "abc" not in told and told.count("[redacted]") == 2


def test_a_failing_webhook_is_said_without_its_address(monkeypatch, tmp_path):
    with chat(lambda number, handler: (404, {})) as (url, _):
        monkeypatch.setenv(VARIABLE, url)
        events, stream = Events(tmp_path, primary=True), io.StringIO()
        writer = make_writer(tmp_path, stream, events.note)
        for step in range(1, 41):
            writer.write(step, record(step, loss=3.0 if step < 20 else 9.0))
        writer.close()
        events.close()
    everything = stream.getvalue() + "".join(path.read_text() for path in tmp_path.iterdir())
    assert "webhook: the server returned 404" in stream.getvalue()
    assert "secretpath" not in everything and url not in everything


def record(step, loss=3.0, **more):
    return {"loss": loss, "learning_rate": 1e-3, "grad_norm": 1.0, "batch_index": step - 1, "skipped_total": 0} | more


def make_writer(folder, stream, note, start_step=0, primary=True):
    diagnosis = Diagnosis(HealthConfig(), RunFacts(workdir="runs/a", branched=True), note)
    cfg = MonitorConfig(tensorboard=False, progress="lines")
    return Writer(folder, cfg, 100, start_step, primary=primary, stream=stream, diagnosis=diagnosis)


def test_the_writer_hands_every_record_to_the_diagnosis_and_the_run_says_what_is_wrong(tmp_path):
    events, stream = Events(tmp_path, primary=True), io.StringIO()
    writer = make_writer(tmp_path, stream, events.note)
    for step in range(1, 31):
        writer.write(step, record(step, loss=3.0 if step != 25 else 8.0))
    writer.close()
    events.close()
    told = [(event["step"], event["what"], event["over"]) for event in read_events(tmp_path)]
    assert told == [(25, "spike", False), (28, "spike", True)]
    assert "health: step 25: spike: the loss is 8, 2.67 times the median 3" in stream.getvalue()
    assert "jaxscale trace --workdir=runs/a --batch=24" in stream.getvalue()


def test_only_the_first_process_alerts(tmp_path):
    stream = io.StringIO()
    writer = make_writer(tmp_path, stream, lambda *args, **facts: pytest.fail("noted"), primary=False)
    for step in range(1, 31):
        writer.write(step, record(step, loss=3.0 if step < 20 else 9.0))
    writer.close()
    assert stream.getvalue() == ""


def test_a_run_that_goes_on_repeats_no_alert_and_knows_what_is_still_wrong(tmp_path):
    told = []
    note = lambda kind, step, **facts: told.append((step, facts["what"], facts["over"]))
    values = [3.0] * 20 + [8.0] * 4 + [3.0] * 10
    writer = make_writer(tmp_path, io.StringIO(), note)
    for step, loss in enumerate(values[:23], 1):
        writer.write(step, record(step, loss=loss))
    writer.close()
    assert told == [(21, "spike", False)]
    writer = make_writer(tmp_path, io.StringIO(), note, start_step=22)
    for step, loss in list(enumerate(values, 1))[22:]:
        writer.write(step, record(step, loss=loss))
    writer.close()
    assert told == [(21, "spike", False), (27, "spike", True)]


def test_a_fault_of_the_diagnosis_is_said_once_and_ends_no_run(tmp_path):
    noted, stream = [], io.StringIO()
    writer = make_writer(tmp_path, stream, lambda kind, step, **facts: noted.append((kind, facts["what"])))
    writer.diagnosis.health.rules.insert(0, types.SimpleNamespace(kind="broken", update=lambda view: 1 / 0))
    for step in range(1, 4):
        writer.write(step, record(step))
    writer.close()
    assert stream.getvalue().count("alerts are disabled from step 1 on by an internal error: ZeroDivisionError") == 1
    assert noted == [("alarm", "no diagnosis")] and len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


def test_events_are_heard_and_still_noted():
    noted = []
    diagnosis = Diagnosis(HealthConfig(), RunFacts(), lambda kind, step, **facts: noted.append((kind, step, facts)))
    heard = diagnosis.wrap_note(diagnosis.note)
    heard("rewind", 40, to=20)
    heard("saved", 41)
    assert noted == [("rewind", 40, {"to": 20}), ("saved", 41, {})]
    assert diagnosis.events == [{"event": "rewind", "step": 40}]


def test_the_largest_documents_of_the_batch_are_told_and_a_fault_in_finding_them_is_said_once(tmp_path):
    said, noted = [], []
    diagnosis = Diagnosis(
        HealthConfig(), RunFacts(branched=True), lambda kind, step, **facts: noted.append(facts),
        lambda batch: [f"web w{batch}.txt, document {n}" for n in range(12)],
    )  # fmt: skip
    diagnosis.replay([], said.append)
    values = [3.0] * 20 + [8.0] * 2 + [3.0] * 10
    for step, loss in enumerate(values, 1):
        diagnosis.update({"step": step} | record(step, loss=loss))
    assert noted[0]["documents"] == [f"web w20.txt, document {n}" for n in range(8)]
    assert (noted[0]["numbers"]["batch"], noted[0]["numbers"]["documents"]) == (20, 12)
    assert "; batch 20 has web w20.txt, document 0; web w20.txt, document 1; and 10 more documents; try" in said[0]
    assert noted[1]["over"] and noted[1]["documents"] == []
    finding = SPIKE._replace(numbers={"batch": 7, "documents": 1}, documents=("a b, document 0",))
    assert "\nBatch 7 has a b, document 0\nWhat to try:" in format_message(finding)

    diagnosis.documents = lambda batch: 1 / 0
    for number in (1, 2):
        assert diagnosis.with_documents(SPIKE._replace(numbers={"batch": number})).documents == ()
    assert [line for line in said if "because of an internal error: ZeroDivisionError" in line] == said[-1:]


def test_a_forecast_of_no_use_is_said_and_left_out(tmp_path):
    said, config = [], {"config": {}, "budget": {"total_steps": 10}}
    assert read_facts(tmp_path, config, None, said.append).forecast == () and not said
    (tmp_path / "forecast.json").write_text('{"tokens": [1, 2], "low": [2, 1], "middle": [3, 2], "high": [4, 3]}')
    assert read_facts(tmp_path, config, [3], said.append).forecast == ((1, 2, 4), (2, 1, 3)) and not said
    for wrong in ("{", '{"tokens": [1]}', '{"tokens": [1], "low": [1, 2], "high": [1]}', "[1]"):
        (tmp_path / "forecast.json").write_text(wrong)
        assert read_facts(tmp_path, config, None, said.append).forecast == ()
    assert len(said) == 4 and all("health: the loss is not compared with" in line for line in said)


def test_what_is_told_is_plain_text_and_json():
    assert format_line(SPIKE).count("\n") == 0 and format_message(OVER) == format_line(OVER)
    json.dumps(finding_to_json(SPIKE), allow_nan=False)


@pytest.mark.fault("H16")
def test_a_message_calls_nobody_and_hides_no_link():
    told = redact.in_slack("<!channel> <http://e.example|the docs> @here @me [docs](http://e.example) a\u202eb\x1b[2J")
    assert told == ("&lt;!channel&gt; &lt;http://e.example|the docs&gt; @\u200bhere @me [docs] (http://e.example) ab")
