"""Every experiment once, with real runs of a tiny model: nothing here asserts what is best."""

import re

import pytest

from jaxscale import main as training
from jaxscale.cli.lab import main
from jaxscale.tools.lab.experiment import Options
from jaxscale.tools.lab.experiment_page import lab_page
from jaxscale.tools.lab.experiments import EXPERIMENTS
from jaxscale.tools.lab.trial import Base, distinct, folder_of, read_result

TINY = {
    "train_tokens": "4096", "seq_len": "32", "batch_tokens": "256", "eval.num_rows": "8", "model.num_layers": "1",
    "model.embed_dim": "16", "model.num_kv_heads": "2", "model.head_dim": "8", "model.mlp_dim": "32",
    "model.num_heads": "2",
}  # fmt: skip
# The flags that make each experiment small, and words of its verdict.
SMALL = {
    "vary": (["--vary=optim.peak_lr=1e-3,4e-3", "--seeds=1"], "optim.peak_lr=4e-3 has the lowest loss"),
    "resume": ([], "are bit-identical"),
    "precision": (["--seeds=1"], "fp8 products"),
    "clipping": (["--rates=4e-3", "--seeds=1"], "The lowest held-out loss is"),
    "rate": (["--names=adamw", "--batches=256,512", "--rates=4e-3", "--seeds=1"], "With adamw"),
    "batch": (["--batches=256,512,1024", "--rates=4e-3", "--seeds=1"], "The gradient noise scale"),
    "optimizers": (["--rates=4e-3", "--seeds=1"], "Held-out loss, best first"),
    "width": (["--sizes=1,2", "--rates=4e-3", "--seeds=1"], "the residual stream to the power"),
    "shape": (["--sizes=1,3", "--rates=4e-3", "--seeds=1"], "has the lowest loss"),
    "isoflop": (["--sizes=0.5,1"], "Lowest loss among the sizes tried"),
    "ladder": (["--sizes=0.5,1,1.5", "--seeds=1", "--target=2"], "No prediction for the target"),
}  # fmt: skip


@pytest.mark.soak
def test_a_sweep_of_real_runs_ends_in_a_page(tmp_path):
    base, seen = Base.load("configs/lab.py", TINY), []

    def run(trials):
        for trial in distinct(trials):
            training.main(trial.command(folder_of(trial, tmp_path)))
        seen.extend(read_result(trial, tmp_path) for trial in trials)
        return seen

    found = EXPERIMENTS["vary"].answer(base, Options(seeds=1, vary=(("optim.peak_lr", ("1e-3", "4e-3")),)), run)
    slow, fast = seen
    assert fast.loss < slow.loss < 6 and not fast.diverged and len(fast.curve()[0]) == 16
    assert found.verdict[0].startswith(f"optim.peak_lr=4e-3 has the lowest loss, {fast.loss:.4g} nats")
    page = lab_page("vary", EXPERIMENTS["vary"], base, seen, found)
    assert page.count('<figure class="plot"') == 2 and f"{slow.loss:.4f}" in page


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """The folder of all experiments: what one has run, the next finds."""
    return tmp_path_factory.mktemp("lab")


@pytest.mark.soak
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_runs_its_trials_and_writes_its_page(name, work, capsys, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")  # with those of the tests XLA:CPU has no int8 products in bfloat16
    flags, words = SMALL[name]
    settings = [f"--config.{setting}={value}" for setting, value in TINY.items()]
    assert main([name, *flags, *settings, f"--workdir={work}", "--jobs=2"]) == 0
    shown = capsys.readouterr().out
    assert words in shown and re.search(r"\bnan\b", shown) is None, shown
    assert "<h1>" in (work / f"{name}.html").read_text()
