"""launch/notebooks/quickstart.ipynb runs from top to bottom on a CPU, on a small text and a smaller model."""

import os

import pytest
from notebooks import code_of, printed, run, shown
from scripts import LAUNCH, ROOT
from xla_flags import xla_flags

NOTEBOOK = LAUNCH / "notebooks" / "quickstart.ipynb"
SMALL = dict(num_layers=1, embed_dim=32, num_heads=2, num_kv_heads=2, head_dim=16, mlp_dim=64)
STEP_TOKENS = 8 * 32


@pytest.mark.soak
def test_it_installs_trains_plots_samples_and_goes_on(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("XLA_FLAGS", xla_flags(1))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    (tmp_path / "text.txt").write_text("def f(x):\n    return x + 1\n\n" * 600)
    overrides = [
        "--config.seq_len=32", f"--config.batch_tokens={STEP_TOKENS}", "--config.data.name=files",
        f"--config.data.files={tmp_path / 'text.txt'}", "--config.sample.num_tokens=20", "--config.eval.num_rows=8",
        "--config.eval.every_steps=5", *(f"--config.model.{name}={value}" for name, value in SMALL.items()),
    ]  # fmt: skip
    book = run(
        NOTEBOOK,
        ROOT / "launch",
        REPO="",
        WORKDIR=str(tmp_path / "run"),
        TRAIN_TOKENS=10 * STEP_TOKENS,
        MORE_TOKENS=15 * STEP_TOKENS,
        OVERRIDES=overrides,
    )
    install, train, plot, sample, go_on = code_of(book)
    assert printed(install).strip() == f"cpu; code in {ROOT}; the run in {tmp_path / 'run'}"
    assert "done: 10 steps" in printed(train)
    assert "resuming from step 10" in printed(go_on) and "done: 15 steps" in printed(go_on)
    assert printed(sample).startswith("def ") and printed(sample) != printed(go_on)
    for cell in (plot, go_on):
        assert shown(cell, "image/png"), "no picture of the loss"
    assert (tmp_path / "run" / "checkpoints" / "15").is_dir()


@pytest.mark.soak
def test_a_failed_training_stops_the_notebook_and_shows_why(tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient", reason="needs the extra test: nbclient and ipykernel")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="training ended with exit code 2") as failed:
        values = dict(REPO="", WORKDIR=str(tmp_path / "run"), TRAIN_TOKENS=1, MORE_TOKENS=2)
        run(NOTEBOOK, os.fspath(ROOT / "launch"), **values, OVERRIDES=["--config.optim.peek_lr=1"])
    assert "did you mean 'peak_lr'" in str(failed.value)
