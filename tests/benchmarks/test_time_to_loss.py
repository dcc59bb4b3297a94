"""benchmarks/time_to_loss.py: whole runs compared with other programs on the same rows."""

import json
import sys

import numpy as np
import pytest

from benchmarks import time_to_loss
from jaxscale.settings.config_file import load_config
from jaxscale.system.exits import BadInput

TINY = {
    "batch_tokens": 8 * 32, "seq_len": 32, "train_tokens": "3 steps", "eval.num_rows": 8, "model.num_layers": 1,
    "model.embed_dim": 16, "model.num_heads": 2, "model.num_kv_heads": 2, "model.head_dim": 8, "model.mlp_dim": 16,
    "sample.num_tokens": 0,
}  # fmt: skip
OTHER = """
import json, sys
import numpy as np
rows = np.load(sys.argv[1] + "/rows.npz")  # its model is how often each byte comes
counts = np.bincount(rows["targets"][rows["weights"] > 0], minlength=264) + 1
nats = -np.log(counts / counts.sum())[rows["held_targets"]]
print("so much of", json.load(open(sys.argv[1] + "/model.json"))["hidden_size"])
print(json.dumps(dict(tokens=rows["tokens"].size, loss=float((nats * rows["held_weights"]).sum() / rows["held_weights"].sum()))))
"""  # noqa: E501


@pytest.mark.slow
def test_the_rows_of_others_are_those_of_the_run_and_of_its_validation(tmp_path):
    cfg = load_config("configs/quickstart.py", TINY)
    time_to_loss.write_rows(cfg, str(tmp_path))
    rows = np.load(tmp_path / time_to_loss.ROWS)
    assert rows["tokens"].shape == (time_to_loss.HORIZON * 3 * 8, 32) and rows["held_targets"].shape == (8, 32)
    assert (rows["tokens"][:, 1:] == rows["targets"][:, :-1])[rows["weights"][:, :-1] > 0].all()
    corpus = time_to_loss.open_data(cfg.data, seq_len=32, vocab_size=264, seed=cfg.seed, say=lambda text: None)
    np.testing.assert_array_equal(corpus.batches(8).batch(2).tokens, rows["tokens"][16:24])
    assert json.loads((tmp_path / time_to_loss.MODEL).read_text())["hidden_size"] == 16


def test_what_was_not_reached_is_said_and_ratios_are_of_medians():
    systems = [
        dict(name="jaxscale", tokens=400, loss=[1.5, 1.5, 1.6], seconds=[10.0, 12.0, 11.0]),
        dict(name="slow", tokens=1000, loss=[1.4, 1.4, 1.4], seconds=[22.0, 21.0, 40.0]),
        dict(name="bad", tokens=100, loss=[3.0], seconds=[5.0]),
    ]
    text = "\n".join(time_to_loss.time_lines(dict(loss=1.5, rounds=3, systems=systems)))
    assert "jaxscale / [1]: 0.40 of the tokens, 0.50 of the seconds, to 1.071 times the loss" in text
    assert [line.split()[0] for line in text.splitlines() if line.endswith("not reached")] == ["[2]"]


def test_without_a_config_or_held_out_rows_it_says_what_is_missing(tmp_path):
    with pytest.raises(BadInput, match="pass --config=FILE"):
        time_to_loss.main([])
    with pytest.raises(BadInput, match=r"set eval\.num_rows"):
        time_to_loss.write_rows(load_config("configs/quickstart.py", TINY | {"eval.num_rows": 0}), str(tmp_path))


@pytest.mark.soak
def test_a_run_and_another_program_are_timed_in_turn(tmp_path, capfd):
    script = tmp_path / "other.py"
    script.write_text(OTHER)
    settings = [f"--config.{name}={value}" for name, value in TINY.items()]
    against = f"--against={sys.executable} {script}"
    time_to_loss.main(["--config=configs/quickstart.py", *settings, against, "--rounds=1", "--json"])
    record = json.loads(capfd.readouterr().out)
    ours, other = record["systems"]
    assert ours["tokens"] == 3 * 256 and other["tokens"] == 4 * 3 * 256
    assert record["loss"] == ours["loss"][0] and 2 < other["loss"][0] < ours["loss"][0] < 6
    assert min(ours["seconds"][0], other["seconds"][0]) > 0
