"""The chat page talks with this machine alone, one conversation at a time, and shows every text as text."""

import http.client
import json
import threading

import pytest

from jaxscale.runtime.sampling.chat_server import SCRIPT, ChatHandler, chat_page, check_messages, csp_source, open_chat
from jaxscale.runtime.sampling.text_stream import GeneratedText
from jaxscale.system.exits import BadInput

HI = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def serve():
    """serve(answer) -> port; each server ends with the test."""
    servers = []

    def start(answer):
        server = open_chat(answer, "runs/<b>/checkpoints/3", 0, 64)
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()  # looks often for its end
        return server.server_address[1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def ask(port, method="POST", path="/say", value=HI, body=None, **headers):
    """(status, headers, body) of a request."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    body = None if method == "GET" else body or json.dumps(value)
    told = {"Content-Type": "application/json"} | {name.replace("_", "-"): text for name, text in headers.items()}
    connection.request(method, path, body, told)
    answer = connection.getresponse()
    found = answer.status, answer.headers, answer.read().decode()
    connection.close()
    return found


def lines(body):
    return [json.loads(line) for line in body.splitlines()]


def echo(messages, written):
    written.append(GeneratedText(tokens=2, reason="end"))
    yield from (f"<i>{messages[-1]['content']}</i>", "é")


def test_a_turn_comes_in_pieces_and_then_what_it_is_in_all(serve):
    status, headers, body = ask(serve(echo))
    assert (status, headers.get_content_type()) == (200, "application/x-ndjson")
    assert lines(body) == [{"text": "<i>hi</i>"}, {"text": "é"}, {"done": "end", "tokens": 2}]


def test_pieces_are_sent_as_they_come(serve):
    go_on = threading.Event()

    def slow(messages, written):
        written.append(GeneratedText(tokens=2))
        yield "a"
        assert go_on.wait(20)
        yield "b"

    port = serve(slow)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("POST", "/say", json.dumps(HI), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    assert json.loads(answer.readline()) == {"text": "a"}  # the second is not written yet
    assert ask(port)[0] == 503  # and nobody else may ask
    go_on.set()
    assert lines(answer.read().decode())[0] == {"text": "b"}
    connection.close()


def test_a_reader_who_goes_away_ends_the_writing_and_the_next_is_answered(serve):
    ended, began = threading.Event(), threading.Event()

    def endless(messages, written):
        written.append(GeneratedText())
        try:
            while messages[0]["content"] != "next":
                yield "x" * 65_536
                began.set()
        finally:
            ended.set()

    port = serve(endless)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("POST", "/say", json.dumps(HI), {"Content-Type": "application/json"})
    assert began.wait(20)
    connection.sock.close()
    connection.close()
    assert ended.wait(20)
    for _ in range(100):
        status, _, body = ask(port, value={"messages": [{"role": "user", "content": "next"}]})
        if status == 200:
            break
    assert lines(body) == [{"done": "length", "tokens": 0}]


def test_a_reader_who_takes_nothing_ends_the_writing_and_nothing_is_printed(serve, monkeypatch, capfd):
    ended = threading.Event()
    monkeypatch.setattr(ChatHandler, "timeout", 0.1)

    def endless(messages, written):
        written.append(GeneratedText())
        try:
            while True:
                yield "x" * 65_536
        finally:
            ended.set()

    port = serve(endless)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("POST", "/say", json.dumps(HI), {"Content-Type": "application/json"})
    assert ended.wait(20)
    connection.close()
    assert capfd.readouterr().err == ""


def test_a_server_that_ends_breaks_off_what_it_writes_and_begins_nothing():
    ended, began = threading.Event(), threading.Event()

    def endless(messages, written):
        written.append(GeneratedText())
        try:
            while True:
                yield "x"
                began.set()
        finally:
            ended.set()

    with open_chat(endless, "", 0, 64) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        port = server.server_address[1]
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        connection.request("POST", "/say", json.dumps(HI), {"Content-Type": "application/json"})
        assert began.wait(20) and server.end_answer(20) and ended.is_set()
        assert lines(connection.getresponse().read())[-1] == {"error": "the server was stopped"}
        assert ask(port)[0] == 503
        assert not server.end_answer(0.01)  # it is asked once
        server.shutdown()


def test_what_is_wrong_is_told_on_the_page(serve):
    def refuse(messages, written):
        raise BadInput("this has 99 tokens")
        yield ""

    assert lines(ask(serve(refuse))[2]) == [{"error": "this has 99 tokens"}]


@pytest.mark.parametrize(
    "how, status, told",
    [
        (dict(Host="evil.example:80"), 403, "this machine only"),
        (dict(Origin="http://evil.example"), 400, "other pages"),
        (dict(Content_Type="text/plain"), 400, "application/json"),
        (dict(path="/other"), 400, "/say"),
        (dict(value={"messages": []}), 400, "list of at least one message"),
        (dict(body="[" * 200_000), 400, "nested deeper"),
        (dict(value={"messages": [{"role": "system", "content": "x"}]}), 400, "message 1"),
        (dict(Content_Length=str((1 << 20) + 1)), 400, "1 to 1048576 bytes"),
        (dict(Content_Length="9" * 5000), 400, "1 to 1048576 bytes"),  # more digits than int() takes
        (dict(method="GET", path="/etc/passwd"), 404, "only one page"),
        (dict(method="GET", path="/", Host="evil.example"), 403, "this machine only"),
    ],
)
def test_others_are_refused(serve, how, status, told):
    found, _, body = ask(serve(echo), **how)
    assert found == status and told in body


def test_the_page_may_run_its_own_script_and_nothing_else(serve):
    _, headers, body = ask(serve(echo), method="GET", path="/")
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and f"script-src {csp_source(SCRIPT)};" in policy and "unsafe" not in policy
    assert f"<script>{SCRIPT}</script>" in body and "runs/&lt;b&gt;/checkpoints/3" in body
    assert "innerHTML" not in SCRIPT and "http" not in body.replace("http-equiv", "")
    assert chat_page("x").count("<script") == 1


def test_turns_go_by_turns():
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "more": 1}]
    assert check_messages({"messages": [*turns, turns[0]]})[1] == {"role": "assistant", "content": "b"}
    with pytest.raises(ValueError, match="the last message must have role 'user'"):
        check_messages({"messages": turns})


def test_a_port_that_is_taken_is_told(serve):
    port = serve(echo)
    with pytest.raises(ValueError, match=f"--serve={port}: cannot listen on this port"):
        open_chat(echo, "", port, 64)


@pytest.mark.fault("H18")
@pytest.mark.parametrize(
    "texts, status", [(["hi"] * 9, 200), (["x" * 2048], 200), (["x"] * 9_999, 413), (["x" * 4096], 413)]
)
def test_a_conversation_is_measured_before_it_takes_the_model(serve, texts, status):
    asked = []

    def answer(messages, written):
        asked.append(messages)
        yield from echo(messages, written)

    messages = [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(texts)]
    found, _, body = ask(serve(answer), value={"messages": messages})
    assert found == status and bool(asked) == (status == 200)
    assert status == 200 or "start a new conversation, or write less" in lines(body)[0]["error"]
