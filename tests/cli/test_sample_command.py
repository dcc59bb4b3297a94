"""jaxscale sample: what a person types, sees, and is told."""

import functools
import http.client
import io
import json
import re
import shutil
import signal
import subprocess
import sys

import made_model
import pytest
import verbs

from jaxscale.api.writing import SampleOptions
from jaxscale.cli import sample
from jaxscale.runtime.sampling.generator import Timing
from jaxscale.runtime.sampling.text_stream import GeneratedText
from jaxscale.runtime.text.chat.template import load_template
from jaxscale.runtime.text.config import ChatConfig
from jaxscale.runtime.text.tokenizer.load import load_tokenizer, save_tokenizer

written, told = functools.partial(verbs.printed, sample), functools.partial(verbs.told, sample)


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    made_model.make_workdir(folder, scale=3.0)
    return str(folder)


@pytest.mark.slow
def test_a_text_goes_to_stdout_behind_its_prompt_and_its_speed_beside_it(workdir, capsys):
    out, err = written(capsys, f"--workdir={workdir}", "--prompt=hi", "--num_tokens=12", "--temperature=0")
    assert out.startswith("hi") and out.endswith("\n") and len(out.encode(errors="replace")) >= 13
    assert "prefill 2 tokens" in err and "decode 11 tokens" in err and "tokens/s" in err
    before, compiling, compiled, speed = err.splitlines()
    assert ": llama, " in before and speed.startswith("prefill")
    assert compiling == "compiling for 8 rows, prompts of up to 16 tokens and texts of up to 128"
    assert re.fullmatch(r"compiled in [0-9.]+ s", compiled)
    stop = out[2:].rstrip("\n")[3:5]
    same = ["--prompt=hi", "--num_tokens=12", "--temperature=0"]
    shown, err = written(capsys, f"--workdir={workdir}", *same, f"--stop={stop}", "--json")
    shorter = json.loads(shown)
    assert (shorter["text"], shorter["reason"]) == (out[2:].partition(stop)[0], "stop")
    assert int(re.search("decode ([0-9]+) tokens", err)[1]) < 11  # those behind the stop text do not count


@pytest.mark.soak
def test_prompts_of_a_file_are_written_in_batches_of_several_samples_on_a_mesh(workdir, capsys, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('"a long beginning"\n{"prompt": "b"}\n\n{"text": "c"}\n')
    flags = [f"--workdir={workdir}", f"--prompts={file}", "--num_samples=2", "--num_tokens=5", "--seed=4", "--json"]
    out, err = written(capsys, *flags, "--batch=4", "--mesh.data=2", "--mesh.tensor=2")
    assert "tokens/s in 4 rows" in err and "tokens/s in 2 rows" in err
    found = [json.loads(line) for line in out.splitlines()]
    assert [(line["prompt"], line["sample"]) for line in found] == [
        (prompt, number) for prompt in ("a long beginning", "b", "c") for number in (0, 1)
    ]
    assert all(line["reason"] == ("length" if line["tokens"] == 5 else "end") for line in found)
    assert found[0]["text"] != found[1]["text"]


def test_the_speed_is_of_tokens_that_are_in_a_text_and_of_no_prompt():
    said = []
    writer = sample.TextWriter(None, SampleOptions(), said.append)
    timing = Timing(9.0, 0.5, prompt_tokens=20, decode_seconds=2.0, decoded_tokens=70)
    writer.log_speed(timing, [GeneratedText(tokens=31), GeneratedText(tokens=11), GeneratedText(tokens=0)])
    writer.log_speed(timing, [GeneratedText(tokens=1)])
    assert said == [
        "prefill 20 tokens, 40 tokens/s; decode 40 tokens, 20 tokens/s in 3 rows",
        "prefill 20 tokens, 40 tokens/s",
    ]


class Interrupted(io.StringIO):
    """A terminal at which somebody presses Ctrl-C when this piece of text is written."""

    def __init__(self, at):
        super().__init__()
        self.pieces = at

    def write(self, text):
        self.pieces -= 1
        if not self.pieces:
            raise KeyboardInterrupt
        return super().write(text)


@pytest.fixture(scope="module")
def chat_workdir(workdir, tmp_path_factory):
    """The same model, as if trained on chat."""
    folder = tmp_path_factory.mktemp("chat") / "run"
    shutil.copytree(workdir, folder)
    tokenizer = load_tokenizer("bytes")
    save_tokenizer(tokenizer, folder, load_template(tokenizer, ChatConfig()).note)
    return str(folder)


def prefills(err):
    return [int(number) for number in re.findall("prefill ([0-9]+) tokens", err)]


@pytest.mark.slow
def test_a_conversation_grows_and_ctrl_c_ends_one_answer_of_it_and_what_is_too_long_is_not_kept(
    chat_workdir, capsys, monkeypatch
):
    flags = [f"--workdir={chat_workdir}", "--chat", "--num_tokens=6", "--temperature=0", "--context=256"]
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n" + "long" * 99 + "\ntwo\n"))
    out, err = written(capsys, *flags)
    first, second = prefills(err)
    assert first + len("two") < second < first + 99 and "error: the prompt has" in err and "at most 256" in err
    assert len(out.splitlines()) >= 3  # each answer ends its line
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))
    monkeypatch.setattr("sys.stderr", told := Interrupted(at=5))  # when it is told what is being compiled
    assert sample.main(flags) == 0
    assert "interrupted; Ctrl-D exits the program" in told.getvalue()
    assert "the answer was cut off at --num_tokens=6" in told.getvalue()
    assert prefills(told.getvalue()) == [first]  # nothing had been answered: it is as if it had not been asked


@pytest.mark.slow
def test_ctrl_c_ends_a_text_of_a_person_and_an_answer_to_a_flag_altogether(chat_workdir, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))
    monkeypatch.setattr("sys.stdout", shown := Interrupted(at=3))
    flags = [f"--workdir={chat_workdir}", "--num_tokens=6", "--temperature=0", "--context=256"]
    _, err = written(capsys, *flags, "--interactive")
    assert "interrupted" in err and shown.getvalue().startswith("one") and "\ntwo" in shown.getvalue()
    monkeypatch.setattr("sys.stdout", Interrupted(at=1))
    with pytest.raises(KeyboardInterrupt):
        sample.main([*flags, "--chat", "--prompt=one", "--prompt=two"])


@pytest.mark.soak
@pytest.mark.parametrize("while_it_writes", [False, True])
def test_ctrl_c_ends_the_chat_page_in_time_and_without_a_word(chat_workdir, while_it_writes):
    flags = [f"--workdir={chat_workdir}", "--chat", "--serve=0", "--num_tokens=9000", "--context=9999", "--devices=1"]
    command = [sys.executable, "-m", "jaxscale.cli", "sample", *flags, "--temperature=2"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            port = next(int(line.split(":")[2].partition("/")[0]) for line in server.stderr if line.startswith("http"))
            if while_it_writes:
                asked = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
                said = json.dumps({"messages": [{"role": "user", "content": "hi"}]})
                asked.request("POST", "/say", said, {"Content-Type": "application/json"})
                answer = asked.getresponse()
                assert "text" in json.loads(answer.readline())  # it is compiled, and goes on
            server.send_signal(signal.SIGINT)
            told = server.communicate(timeout=100)[1]
        finally:
            server.kill()
    assert server.returncode == 0 and [line for line in told.splitlines() if not line.startswith("compil")] == []


@pytest.mark.soak
def test_samples_do_not_depend_on_the_mesh_and_the_batch(workdir, capsys, tmp_path):
    flags = [f"--workdir={workdir}", "--prompt=a long beginning", "--prompt=b", "--num_samples=2", "--num_tokens=5"]
    flags += ["--seed=4", "--json"]
    out, _ = written(capsys, *flags, "--batch=4", "--mesh.data=2", "--mesh.tensor=2")
    again, _ = written(capsys, *flags, "--batch=6", "--config.mesh.fsdp=4", "--config.mesh.data=2")
    assert again == out


def test_prompts_come_from_a_terminal_until_it_ends(workdir, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\n" + "too long for it" * 9 + "\ntwo\n"))
    flags = [f"--workdir={workdir}", "--interactive", "--num_tokens=4", "--temperature=0", "--context=64"]
    out, err = written(capsys, *flags)
    assert "one" in out and "two" in out
    assert "error: the prompt has 135 tokens, but prompt and answer together can have at most 64" in err
    assert "texts have up to 64 tokens, but the model was trained with seq_len=16" in err


def test_help_begins_with_an_example(capsys):
    out, _ = written(capsys, "--help")
    assert "jaxscale sample --workdir=" in "".join(out.splitlines()[:3])


@pytest.mark.parametrize(
    "flags, wanted",
    [
        (["--prompt=a"], "--workdir must be given"),
        (["--workdir=/nowhere/run", "--prompt=a"], "--workdir=/nowhere/run contains no checkpoint"),
        (["--workdir=w", "--temperature=hot"], "--temperature='hot' is not a number"),
        (["--workdir=w", "--temperature=-1"], "temperature=-1.0 must be 0 or more"),
        (["--workdir=w", "--top_p=2"], "top_p=2.0 must be above 0 and at most 1"),
        (["--workdir=w", "--top_k=2.5"], "--top_k=2.5 is not an integer"),
        (["--workdir=w", "--num_tokens=0"], "--num_tokens=0 must be a whole number, 1 or more"),
        (["--workdir=w", "--seed=-1"], "--seed=-1 must be a whole number"),
        (["--workdir=w", f"--seed={2**32}"], "seed=4294967296 must be a whole number from 0 to 4294967295"),
        (["--workdir=w", "--prompt="], "--prompt needs a value"),
        (["--workdir=w", "--prompt", "--json"], "--prompt needs a value"),
        (["--workdir=w", "--prompts=/no/file.txt"], "--prompts=/no/file.txt is not a file"),
        (["--workdir=w", "--config.model.num_layers=3"], "only --mesh.AXIS can be set"),
        (["--workdir=w", "--config=c.py"], "the settings are read from the work folder"),
        (["--workdir=w", "--mesh.data=0"], "mesh: data=0 must be a positive number"),
        (["--workdir=w", "--interactive", "--chat"], "use one of them"),
        (["--workdir=w", "--interactive", "--prompt=a"], "remove --prompt"),
        (["--workdir=w", "--serve"], "--serve requires --chat"),
        (["--workdir=w", "--chat", "--num_samples=2"], "remove it"),
        (["--workdir=w", "--interactive", "--json"], "--json does not apply to --interactive and --chat"),
        (["--workdir=w", "--system=x"], "--system applies only to --chat"),
        (["--workdir=w", "--promt=a"], "did you mean --prompt?"),
        (["--workdir=w", "--compute_dtype=int4"], "--compute_dtype=int4 must be float32, bfloat16 or float16"),
    ],
)
def test_bad_input_is_told_in_a_line(flags, wanted):
    assert wanted in told(*flags)


@pytest.mark.parametrize(
    "name, content, wanted",
    [
        ("empty.txt", b"\n \n", "is empty"),
        ("half.txt", b"\xff\xfe", "is not UTF-8"),
        ("bad.jsonl", b'"a"\n\n{"question": 1}\n', "line 3 is neither a JSON string"),
    ],
)
def test_a_file_without_prompts_is_told(tmp_path, name, content, wanted):
    (tmp_path / name).write_bytes(content)
    assert wanted in told("--workdir=w", f"--prompts={tmp_path / name}")


def test_a_line_of_a_file_ends_where_the_line_feed_is(tmp_path):
    (tmp_path / "a.jsonl").write_bytes('\ufeff"a\u2028b"\r\n{"prompt": "c\x85"}'.encode())
    assert sample.read_prompts(["first"], str(tmp_path / "a.jsonl")) == ["first", "a\u2028b", "c\x85"]
    (tmp_path / "a.txt").write_bytes("\ufeffa\u2028b\r\n\r\n c ".encode())
    assert sample.read_prompts([], str(tmp_path / "a.txt")) == ["a\u2028b", " c "]


def test_a_model_that_was_not_made_for_chat_is_told(workdir):
    assert "chat template" in told(f"--workdir={workdir}", "--chat", "--prompt=a")


@pytest.mark.soak
def test_what_a_model_cannot_read_is_told(tmp_path):
    gpt2 = {"name": "gpt2", "num_layers": 1, "embed_dim": 16, "num_heads": 2, "max_seq_len": 32, "vocab_size": 258}
    made_model.make_workdir(tmp_path / "short", {"model": gpt2 | {"compute_dtype": "float32"}})
    flags = [f"--workdir={tmp_path}/short", "--prompt=" + "x" * 32]
    assert "has 32 tokens, but at most 32 (model.max_seq_len) are allowed" in told(*flags)
