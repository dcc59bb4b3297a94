"""A run that trains says itself what is wrong with it, in events.jsonl too, and a rewind is among the evidence."""

import tiny

from jaxscale.monitor.events import read_events
from jaxscale.run import open_run
from jaxscale.train import loop

QUIET = {
    "monitor.progress": "lines", "monitor.tensorboard": False, "monitor.log_every_steps": 1, "eval.num_rows": 0,
    "checkpoint.save_every_steps": 0,
}  # fmt: skip


def trained(folder, overrides=None):
    loop.train(open_run(tiny.config(QUIET | (overrides or {})), str(folder), say=lambda text: None))
    return [(event["step"], event["what"]) for event in read_events(folder) if event["event"] == "alert"]


def test_a_batch_of_nothing_but_nan_is_told_by_the_run_itself(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JAXSCALE_SPOIL_BATCHES", "6:7:nan")
    assert trained(tmp_path / "run") == [(7, "nonfinite"), (12, "nonfinite")]
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("health: ")]
    assert lines[0].startswith("health: step 7: nonfinite: loss and grad_norm not finite; likely: ")
    assert lines[1].startswith("health: step 12: nonfinite is over")
    assert trained(tmp_path / "silent", {"monitor.health.off": ("nonfinite",)}) == []


def test_a_run_whose_address_for_alerts_is_no_good_says_so_before_it_trains(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXSCALE_WEBHOOK_URL", "http://chat.example/secretpath")
    try:
        trained(tmp_path / "run")
    except ValueError as error:
        assert "JAXSCALE_WEBHOOK_URL must be an https:// address" in str(error) and "secretpath" not in str(error)
    else:
        raise AssertionError("it trained")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
