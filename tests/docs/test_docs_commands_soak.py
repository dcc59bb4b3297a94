"""The commands of README and docs that take longer than seconds, run as processes in a folder like a reader's."""

import gzip
import json
import os
import pathlib
import subprocess
import sys

import made_ladder
import made_text
import pytest
from doc_kinds import SOAK, kind_of
from page_commands import changed, commands, of_kind
from shell_blocks import ROOT

from jaxscale.settings import config_file

SECONDS = 1200  # for one command, where others keep the machine busy
OTHER = """print('{"tok_s": 1000.0, "seconds": 1.0, "stages": ["c4"]}')"""
SMALLER = """
big = get_config


def get_config():
    c = big()
    c.seq_len, c.batch_tokens, c.train_tokens = 64, 512, 4 * 512
    c.model.update(num_layers=1, embed_dim=32, num_heads=2, num_kv_heads=2, head_dim=16, mlp_dim=64)
    c.optim.warmup_tokens, c.eval.num_rows = "1 steps", 8
    return c
"""
TRAIN = ("python", "-m", "jaxscale.main", "--config=configs/quickstart.py")
TO_TRACE = (*TRAIN, "--workdir=runs/1b", "--config.data.name=files", "--config.data.files=corpus/*.txt")


def of_pages():
    """{page: its commands}; one that stands on several pages is run for the first of them."""
    found, seen = {}, set()
    for command in of_kind(SOAK):
        if command.words not in seen:
            seen.add(command.words)
            found.setdefault(command.page, []).append(command)
    return found


@pytest.fixture
def home(tmp_path):
    """What a reader would have: the repository's files, text of their own, another program, a ladder of runs."""
    for name in ("README.md", "configs", "docs", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    for folder in ("corpus", "raw", "code"):
        (tmp_path / folder).mkdir()
    texts, code = ([made_text.text(seed, words=300) for seed in range(begin, begin + 60)] for begin in (0, 100))
    for place, text in enumerate(texts):
        (tmp_path / "corpus" / f"{place:02}.txt").write_text(text)
    lines, more = ("".join(json.dumps({"text": text}) + "\n" for text in some) for some in (texts, code))
    for place in ("corpus/all.jsonl", "raw.jsonl"):
        (tmp_path / place).write_text(lines)
    for place, content in (("raw", lines), ("code", more)):
        (tmp_path / place / "all.jsonl.gz").write_bytes(gzip.compress(content.encode()))
    (tmp_path / "other.py").write_text(OTHER)
    for width in (64, 96, 128):
        for tokens in (200_000, 400_000, 800_000):
            rung = config_file.load_config(f"{ROOT}/configs/ladder.py:embed_dim={width},tokens={tokens}")
            made_ladder.write(tmp_path / "runs" / "ladder" / f"{width}-{tokens}", rung)
    return tmp_path


def run(words, home):
    """The finished process."""
    if words[0] == "jaxscale":
        words = ["python", "-c", "from jaxscale.cli import main; main()", *words[1:]]
    env = os.environ | {
        "PATH": f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "XDG_CACHE_HOME": str(home.parent / "cache"),  # of all pages: tokens and programs are made once
        "XLA_FLAGS": "",
    }
    return subprocess.run(words, cwd=home, env=env, capture_output=True, text=True, timeout=SECONDS)


@pytest.mark.soak
def test_the_how_to_of_data_runs_word_for_word(home):
    (home / "configs").unlink()
    (home / "configs").mkdir()
    (home / "configs" / "data").symlink_to(ROOT / "configs" / "data")
    (home / "configs" / "1b.py").write_text((ROOT / "configs" / "1b.py").read_text() + SMALLER)
    said = []
    for command in commands():
        if command.page == "docs/howto/prepare_data.md" and command.words[0] != "pip":
            done = run(command.words, home)
            assert done.returncode == 0, (str(command), done.stdout[-2000:], done.stderr[-2000:])
            said.append(done.stdout + done.stderr)
    assert len(said) == 6 and "rows web 0.8, code 0.2" in said[-1] and "in tokens web 0." in said[-1]


@pytest.mark.soak
@pytest.mark.parametrize("page", sorted(of_pages()))
def test_commands_of_a_page_run(page, home):
    commands = of_pages()[page]
    texts = [command.text for command in commands]
    before = [TO_TRACE] if any("jaxscale trace" in text for text in texts) else []
    if any("runs/quickstart" in text for text in texts) and not any(text.startswith(" ".join(TRAIN)) for text in texts):
        before.append(TRAIN)  # the reader has been through the quick start
    for words in before:
        done = run([*words, *kind_of(" ".join(words)).more], home)
        assert done.returncode == 0, done.stderr
    for command in commands:
        kind = kind_of(command.text)
        done = run(changed(command.words, kind), home)
        assert done.returncode == kind.code, (str(command), done.stdout[-2000:], done.stderr[-2000:])
