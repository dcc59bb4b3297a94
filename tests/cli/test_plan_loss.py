"""`plan --loss` tells the end of a run from a ladder, writes the band for its curve, and refuses in one line."""

import json

import made_ladder
import pytest

from jaxscale import schema
from jaxscale.cli.plan_loss import main
from jaxscale.runtime.monitor.history import read_history

TARGET = made_ladder.config(128, 1600)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return made_ladder.write_ladder(tmp_path_factory.mktemp("ladder"))


@pytest.fixture
def config_file(tmp_path):
    file = tmp_path / "big.py"
    file.write_text(f"def get_config():\n    return {schema.to_dict(TARGET)!r}\n")
    return file


@pytest.mark.slow
def test_the_end_of_a_run_is_forecast_with_an_interval_and_its_distance(runs, config_file, tmp_path, capsys):
    made_ladder.write(runs / "broken", made_ladder.config(), until=100)
    done = main(["--loss", f"--runs={runs}/*", f"--config={config_file}", f"--json={tmp_path / 'all.json'}"])
    printed, told = capsys.readouterr().out, json.loads((tmp_path / "all.json").read_text())
    assert done == 0 and len(told["law"]["points"]) == 9
    assert "broken: the run is not finished: step 100 of 200" in printed
    assert "for the largest (64-800); measured" in printed
    low, middle, high = (told["nats_per_token"][name] for name in ("low", "middle", "high"))
    assert low <= made_ladder.end_of(TARGET) <= high
    assert f"{middle:.4f} nats/token, {low:.4f} to {high:.4f} (90% interval)" in printed
    assert told["bits_per_byte"]["middle"] == pytest.approx(made_ladder.BITS_PER_NAT * middle)
    assert f"{told['reach']:.3g} times the FLOPs of the ladder's largest run" in printed
    assert "a forecast of 64-800 from the other runs covers" in printed and told["largest_inside"]["64-800"] > 0.8
    assert "but the 9 curves have" in printed and "Approach 2, parabolas at equal FLOPs: " in printed
    law, size = made_ladder.LAW, told["best_size"]["Approach 3, a law"]["told"]
    assert (
        float(size.split("C ** ")[1][:4]) == pytest.approx(law.beta / (law.alpha + law.beta), abs=0.1)
        and size in printed
    )


@pytest.mark.soak
def test_the_band_lies_in_the_work_folder_where_the_report_finds_it(runs, config_file, tmp_path, capsys):
    folder = tmp_path / "big"
    argv = [f"--runs={runs}/*", f"--config={config_file}", f"--to={folder}"]
    assert main(argv) == 0
    told = json.loads((folder / "forecast.json").read_text())
    assert told["tokens"][-1] == told["train_tokens"] == 1600 * TARGET.tokens_per_step
    assert told["low"][-1] < told["middle"][-1] < told["high"][-1] and "64-800" in told["made_from"]
    made_ladder.write(tmp_path / "real", TARGET)
    for name in ("config.json", "metrics.jsonl"):
        (tmp_path / "real" / name).rename(folder / name)
    assert read_history(folder).forecast["low"] == told["low"]
    assert main(argv) == 0  # once the run has begun it can be forecast again
    with pytest.raises(ValueError, match=r"--to=.* contains a run that differs from the config in its length"):
        main([*argv, "--tokens=102400"])
    with pytest.raises(ValueError, match=r"differs from the config in model.mlp_dim"):
        main([*argv, "--config.model.mlp_dim=64"])


@pytest.mark.slow
def test_five_runs_are_forecast_where_the_noise_is_told(runs, config_file, tmp_path, capsys):
    five = ",".join(f"{runs}/{name}" for name in ("16-200", "16-800", "32-400", "64-200", "64-800"))
    argv = [f"--runs={five}", f"--config={config_file}", f"--json={tmp_path / 'all.json'}"]
    with pytest.raises(ValueError, match="needs at least 7 finished runs, but the ladder has 5.*--noise=0.005"):
        main(argv)
    assert main([*argv, "--noise=0.3%"]) == 0
    told, printed = json.loads((tmp_path / "all.json").read_text()), capsys.readouterr().out
    assert told["noise"] == {"off": pytest.approx(0.003), "measured": False}
    assert "noise of one run: 0.30%, as given" in printed
    free = told["law"]["without_pull"]["alpha"]
    assert (
        "the prior on the exponents (0.35) changes the forecast by" in printed
        and f"alpha {free:.3g} instead of " in printed
    )


@pytest.mark.slow
def test_without_the_same_schedule_there_is_no_band_and_nothing_is_written(runs, config_file, tmp_path, capsys):
    argv = [f"--runs={runs}/*", f"--config={config_file}", "--config.optim.warmup_tokens=20%"]
    with pytest.raises(ValueError, match="requires a loss band, which is missing"):
        main([*argv, f"--to={tmp_path / 'big'}"])
    assert "no band for the loss curve: the schedule of 16-200 is cosine" in capsys.readouterr().out
    assert not (tmp_path / "big").exists()


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--runs=RUNS/16-*"], "needs at least 7 finished runs, but the ladder has 3"),
        (["--runs=RUNS/16-*", "--noise=0.5%"], "but the ladder has 3"),
        (["--runs=RUNS/*", "--noise=5"], "--noise=5 must be a fraction of the loss, at most 0.2"),
        (["--runs=RUNS/none*"], "matches no folder"),
        ([], "--runs must be given"),
        (["--runs=RUNS/*", "--draws=20"], "--draws=20 must be a whole number, 200 or more"),
        (["--runs=RUNS/*", "--config.train_tokens=1 epoch"], "needs the length of the data set"),
        (["--runs=RUNS/*", "--token=5"], "did you mean --tokens"),
        (["--runs=RUNS/*", "--config.seq_len=32"], "the ladder has 0"),
    ],
    ids=[
        "too few",
        "too few with noise",
        "no noise",
        "no folder",
        "no runs",
        "few draws",
        "epochs",
        "misspelt",
        "other rows",
    ],
)
def test_what_cannot_be_forecast_is_refused_in_one_line(runs, config_file, flags, told):
    argv = [flag.replace("RUNS", str(runs)) for flag in flags]
    with pytest.raises(ValueError, match=told) as error:
        main([f"--config={config_file}", *argv])
    assert "\n" not in str(error.value)


def test_help_needs_nothing(capsys):
    assert main(["--loss", "--help"]) == 0
    assert "--runs=PATTERNS" in capsys.readouterr().out
