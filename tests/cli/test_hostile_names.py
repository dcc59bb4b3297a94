"""Names and texts that would drive a terminal, forge a line or run in a page, through everything that shows them."""

import json
import re

import markdown_it
import pytest
import tiny

from jaxscale import main
from jaxscale.cli import ckpt, prepare, report, trace, watch
from jaxscale.system.redact import on_one_line

MARKUP = "<img src=x onerror=alert(1)>|[c](javascript:d)"
NAME = f"a\nrow 9 [0, 1): forged\x1b[2J\u202egpj\u2028b{MARKUP}"
NO_PATTERN = str.maketrans("", "", "[]")  # which no work folder may have in its name
VALUES = tiny.VALUES | dict(
    model=tiny.LLAMA | dict(vocab_size=272, num_layers=1),
    train_tokens="2 steps",
    monitor=dict(progress="lines", tensorboard=True, log_every_steps=1),
    eval=dict(num_rows=0),
    checkpoint=dict(save_every_steps=2),
    sample=dict(num_tokens=4),
    mesh=dict(data=8, fsdp=1),
)


def is_fit_for_a_terminal(text):
    return text.replace("\n", "").replace("\t", "").isprintable()


@pytest.fixture
def run(tmp_path):
    """(folder of shards, work folder) of a run on files of this name."""
    raw, shards, workdir = tmp_path / "raw", tmp_path / "shards", tmp_path / f"run{NAME.translate(NO_PATTERN)}"
    raw.mkdir()
    for number in range(4):
        (raw / f"{number}{NAME}.txt").write_text(f"{number % 3} {NAME} \x1b]0;title\x07" * 40)
    stages = ["--config.stages=('exact_dedup',)", "--config.tokenizer.name=bytes"]
    assert prepare.main([f"--input={raw}/*.txt", f"--output={shards}", "--workers=1", *stages]) == 0
    data = dict(name="tokens", files=str(shards / "manifest.json"), val_fraction=0.0, cache_dir=str(tmp_path / "cache"))
    (tmp_path / "tiny.py").write_text(f"def get_config():\n    return {VALUES | dict(data=data)!r}\n")
    assert main.main([f"--config={tmp_path / 'tiny.py'}", f"--workdir={workdir}"]) == 0
    return shards, workdir


@pytest.mark.slow
@pytest.mark.fault("H16")
def test_what_a_file_is_called_is_told_and_never_obeyed(run, tmp_path, capfd):
    shards, workdir = run
    assert is_fit_for_a_terminal("".join(capfd.readouterr()))

    def told(verb, *flags):
        assert verb.main([f"--workdir={workdir}", *flags]) == 0
        text = "".join(capfd.readouterr())
        assert is_fit_for_a_terminal(text)
        return text

    traced = told(trace, "--step=0").splitlines()
    assert on_one_line(NAME) in traced[0] and all(
        ", tokens [" in line for line in traced if "counted from 0" not in line
    )
    assert json.loads(told(trace, "--step=0", "--json").splitlines()[0])["file"].endswith(f"{NAME}.txt")
    told(watch, "--once")
    assert ckpt.main(["list", f"--workdir={workdir}"]) == 0
    told(report, f"--output={tmp_path / 'report.html'}")
    told(report, "--card", f"--output={tmp_path / 'card.md'}")
    card = markdown_it.MarkdownIt().enable("table").render((tmp_path / "card.md").read_text())
    pages = [card, *((folder / "report.html").read_text() for folder in (tmp_path, shards))]
    for page in pages:
        assert MARKUP.partition("|")[0].replace("<", "&lt;").replace(">", "&gt;") in page and is_fit_for_a_terminal(
            page
        )
        assert not re.search("<img|<a [^>]*javascript:", page)
