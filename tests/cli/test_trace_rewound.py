"""A run that went back, and first learned from a clean source alone, is traced as it trained."""

import json
import shutil

import pytest
from test_trace import home as home
from test_trace import told, train

from jaxscale.settings import config_file

pytestmark = pytest.mark.slow

FLAGS = (
    "--config.train.guard.max_skipped_in_row=1", "--config.train.recovery.rewind_margin_steps=1",
    "--config.train.recovery.clean_source=code", "--config.train.recovery.clean_steps=2",
)  # fmt: skip


@pytest.fixture(scope="module")
def rewound(home, tmp_path_factory):
    """Its batches 6 and 7 are bad: it went back to step 5, left 5 to 7 out, and took 8 and 9 from 'code' alone."""
    workdir, patch = tmp_path_factory.mktemp("runs") / "rewound", pytest.MonkeyPatch()
    patch.setenv("JAXSCALE_SPOIL_BATCHES", "6:8:nan")
    assert train(home, workdir, *FLAGS) == 0
    patch.undo()
    return workdir


@pytest.mark.soak
@pytest.mark.fault("F11")
def test_the_steps_after_a_rewind_learn_from_the_clean_source_and_then_from_the_plan(rewound, capsys):
    found = []
    for step in range(12):  # each is compared with the hash that the devices told: another batch would be an error
        pieces = [json.loads(line) for line in told(capsys, f"--workdir={rewound}", f"--step={step}", "--json")]
        found.append(({piece["batch"] for piece in pieces}, {piece["source"] for piece in pieces}))
    both = {"web", "code"}
    assert [batches for batches, _ in found] == [{n} for n in (0, 1, 2, 3, 4, 8, 9, 10, 11, 12, 13, 14)]
    assert [sources for _, sources in found] == [both] * 5 + [{"code"}] * 2 + [both] * 5
    rewind = next(event for event in events(rewound) if event["event"] == "rewind")
    assert (rewind["to"], rewind["skip_batches"], rewind["clean"]) == (5, [[5, 8]], [8, 2, "code"])


def listed(workdir, capsys, step):
    return [json.loads(line) for line in told(capsys, f"--workdir={workdir}", f"--step={step}", "--json")]


def test_a_copy_without_the_events_is_traced_alike_by_what_its_checkpoints_have_recorded(rewound, capsys, tmp_path):
    shutil.copytree(rewound, tmp_path / "copy")
    (tmp_path / "copy" / "events.jsonl").unlink()
    assert [listed(tmp_path / "copy", capsys, n) for n in (5, 6, 7)] == [listed(rewound, capsys, n) for n in (5, 6, 7)]


def test_a_rewind_that_is_not_yet_carried_out_leaves_what_it_gives_up_still_to_come(rewound, capsys, tmp_path):
    shutil.copytree(rewound, tmp_path / "copy")
    facts = {"to": 5, "batch": 8, "why": "skipped", "skip_batches": [[11, 14]], "clean": None}
    with open(tmp_path / "copy" / "events.jsonl", "a") as log:
        log.write(json.dumps({"time": "", "event": "rewind", "step": 12} | facts) + "\n")
    pieces = [listed(tmp_path / "copy", capsys, step)[0] for step in (4, 5, 8)]
    assert [(piece["batch"], piece["done"]) for piece in pieces] == [(4, True), (8, False), (14, False)]


def events(workdir):
    return [json.loads(line) for line in (workdir / "events.jsonl").read_text().splitlines()]


def test_a_document_of_the_detour_is_found_by_its_name(rewound, capsys):
    (first, *_) = [json.loads(line) for line in told(capsys, f"--workdir={rewound}", "--step=6", "--json")]
    name = f"{first['file']}:{first['offset']}"
    assert 6 in [json.loads(line)["step"] for line in told(capsys, f"--workdir={rewound}", f"--doc={name}", "--json")]


@pytest.mark.parametrize(
    ("overrides", "told_"),
    [
        (
            {"train.recovery.clean_source": "wiki", "train.recovery.clean_steps": 2},
            "'wiki' is not a source of data.mixture",
        ),
        ({"train.recovery.clean_steps": 2}, "clean_source=None and clean_steps=2 must be set together"),
    ],
)
def test_a_clean_source_must_be_one_of_the_mixture(home, overrides, told_):
    with pytest.raises(ValueError, match=told_):
        config_file.load_config(str(home / "tiny.py"), overrides)
