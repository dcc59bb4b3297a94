"""Every command of README and docs is known, right, and run where it can be."""

import gzip
import json
import shutil
import subprocess

import kept_run
import pytest
from doc_flags import problem_of
from doc_kinds import CHEAP, DRY, KINDS, NOT_SHELL, SOAK, kind_of
from made_run import make_run  # noqa: E402
from page_commands import blocks, changed, commands, is_said_to_be_none, is_shell, of_kind
from shell_blocks import ROOT, Block, blocks_of, commands_of, inline_of, pages

from jaxscale import cli
from jaxscale.system.exits import Exit, Stop


def test_every_block_is_shell_or_said_to_be_none():
    strange = [
        f"{block.page}:{block.line}: {block.lines[0]}"
        for block in blocks()
        if not is_shell(block) and not is_said_to_be_none(block)
    ]
    assert not strange, "no program begins these blocks; see NOT_SHELL in tests/docs/doc_kinds.py:\n" + "\n".join(
        strange
    )
    idle = [
        (page, start)
        for page, start in NOT_SHELL
        if not any(block.page == page and block.lines[0].startswith(start) for block in blocks())
    ]
    assert not idle, "no block begins so any more"


def test_every_command_has_a_kind_and_every_kind_a_command():
    unknown = [str(command) for command in commands() if kind_of(command.text) is None]
    assert not unknown, "say in tests/docs/doc_kinds.py whether these can run here:\n" + "\n".join(unknown)
    used = {kind_of(command.text) for command in commands()}
    assert not [kind.pattern for kind in KINDS if kind not in used], "no command is of this kind any more"
    assert len(commands()) > 100 and len(of_kind(CHEAP)) > 10 and len(of_kind(SOAK)) > 20


def test_verbs_flags_and_settings_are_real():
    inline = [one for path in pages() for one in inline_of(path.relative_to(ROOT).as_posix(), path.read_text())]
    assert len(inline) > 20
    problems = {words: problem_of(words) for words in {one.words for one in (*commands(), *inline)}}
    wrong = [f"{one}: {problems[one.words]}" for one in (*commands(), *inline) if problems[one.words]]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("jaxscale plann --flops=1e20", "no verb 'plann'"),
        ("jaxscale ckpt lst --workdir=runs/a", "lst"),
        ("jaxscale report --workdri=runs/a", "workdri"),
        ("jaxscale supervise -- --config=configs/quickstart.py --workdri=x", "workdri"),
        ("jaxscale plan --config=configs/9b.py --topology=v5e:4x4", "not a file"),
        ("jaxscale train --config=configs/quickstart.py --config.optim.peak_rl=1", "peak_rl"),
        ("jaxscale prepare --config=configs/data/web.py --config.near_dedup.treshold=1", "treshold"),
        ("python -m jaxscale.mian --config=configs/7b.py", "no verb's module"),
        ("pip install -e '.[tpuu]'", "no extra tpuu"),
        ("launch/tpu_vm/tpu.sh create --name=a", "no script"),
        ("launch/gke/jobset.sh apply --name=a -- --config=configs/7b.py --config.sed=1", "sed"),
        ("pytest tests/nothing", "not in the repository"),
    ],
)
def test_what_is_wrong_is_seen(text, told):
    (command,) = commands_of(Block("page", 1, (text,)))
    assert told in problem_of(command.words)


@pytest.mark.parametrize("verb", sorted(cli.VERBS))
def test_a_verb_reads_the_flags_before_help(verb):
    inside = {"bench": ["step"], "ckpt": ["list"], "verify": ["resume"]}.get(verb, [])
    assert "no_such_flag" in problem_of(("jaxscale", verb, *inside, "--no_such_flag=1"))


def test_blocks_are_taken_apart_as_a_shell_would():
    shown = ["Text", "", "    a --x='1 2' && b   # told", "    c \\", "        --y", "", "1. item", "", "        d", ""]
    text = "\n".join([*shown, "```python", "no()", "```"])
    found = [command for block in blocks_of("page", text) for command in commands_of(block)]
    assert [(one.line, one.words) for one in found] == [
        (3, ("a", "--x=1 2")), (3, ("b",)), (4, ("c", "--y")), (9, ("d",)),
    ]  # fmt: skip
    loop = Block("page", 1, ("for D in 64 96; do for T in 2 4; do", "    go $D-$T", "done; done"))
    assert [one.words for one in commands_of(loop)] == [("go", "64-2")]


def test_scripts_of_a_cloud_print_what_they_would_run():
    for command in of_kind(DRY):
        words = list(command.words)
        place = next(i for i, word in enumerate(words) if word.startswith("launch/"))
        at = place + 1 if words[place].endswith(".sbatch") else (words.index("--") if "--" in words else len(words))
        words[at:at] = ["--dry-run"]
        done = subprocess.run(["bash", *words[place:]], cwd=ROOT, capture_output=True, text=True, timeout=60)
        told = [line for line in done.stderr.splitlines() if not line.startswith("note: uncommitted changes")]
        assert done.returncode == 0 and not told and done.stdout, (str(command), done.stderr)


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    """A folder with the repository's configs and the records of runs, as a reader of the pages would have them."""
    folder = tmp_path_factory.mktemp("reader")
    for name in ("configs", "launch", "tests", "docs"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "raw").mkdir()
    with gzip.open(folder / "raw" / "a.jsonl.gz", "wt") as file:
        file.write(json.dumps({"text": "Some words. " * 40}) + "\n")
    make_run(folder / "runs" / "quickstart", last=600)
    kept_run.make_run(folder / "runs" / "quickstart")
    for name in ("mine", "1b", "first", "a"):
        shutil.copytree(folder / "runs" / "quickstart", folder / "runs" / name)
    return folder


@pytest.mark.slow
def test_commands_of_seconds_run(records, monkeypatch, capsys):
    monkeypatch.chdir(records)
    ran = {}
    for command in of_kind(CHEAP):
        kind = kind_of(command.text)
        words = changed(command.words, kind)
        verb = words[1:] if words[0] == "jaxscale" else ["train", *words[3:]]
        if tuple(words) in ran:
            continue
        try:
            code = cli.dispatch(verb)
        except Stop as stop:
            code = stop.code
        ran[tuple(words)] = code
        said = capsys.readouterr()
        assert (code or 0) == kind.code, (str(command), said.err)
        assert said.out or code == Exit.NO_GO, str(command)
    assert len(ran) > 10
