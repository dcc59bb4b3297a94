"""lm-eval finds of our model what it finds of the same one under transformers, and so does `jaxscale evaluate`:

python -m venv E && E/bin/pip install -e '.[lm_eval]' torch transformers accelerate
JAXSCALE_LM_EVAL_PYTHON=E/bin/python pytest -m peer tests/eval
"""

import json
import os
import pathlib
import shutil
import subprocess

import jax
import made_model
import numpy as np
import pytest
import tokenizers

from jaxscale.api.inference import open_model
from jaxscale.tools.interop import families

PYTHON = os.environ.get("JAXSCALE_LM_EVAL_PYTHON", "")
HERE = pathlib.Path(__file__).parent
TOLERANCE = 1e-4  # float32 sums taken in another order; measured on nats of 2 to 400
TEXT = "The cat sat on the mat. A dog ran to the cat, and the cat ran home again. Où est le chat ? "

pytestmark = [
    pytest.mark.peer,
    pytest.mark.skipif(not PYTHON, reason="JAXSCALE_LM_EVAL_PYTHON names no Python with lm-eval and transformers"),
]
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TASK = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
fewshot_split: test
{lines}
"""
TASKS = {
    "ask": 'output_type: multiple_choice\ndoc_to_text: "Question: {{goal}}\\nAnswer:"\ndoc_to_target: label\n'
    "doc_to_choice: '{{[sol1, sol2]}}'\nmetric_list: [{metric: acc}, {metric: acc_norm}, {metric: acc_bytes}]",
    "guess": "output_type: loglikelihood\ndoc_to_text: \"{{text.split(' ')[:-1]|join(' ')}}\"\n"
    "doc_to_target: \"{{' '+text.split(' ')[-1]}}\"\nmetric_list: [{metric: perplexity}, {metric: acc}]",
    "read": "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{text}}'\n"
    "metric_list: [{metric: bits_per_byte}, {metric: byte_perplexity}]",
    "write": "output_type: generate_until\ndoc_to_text: '{{text}}'\ndoc_to_target: 'cat'\n"
    "generation_kwargs: {until: ['.'], max_gen_toks: 8}\nmetric_list: [{metric: exact_match}]",
}


def write_tokenizer(folder):
    """A byte-level BPE of some pairs, in the manner of GPT-2's."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=list(SPECIALS), initial_alphabet=sorted(alphabet), show_progress=False
    )
    made.train_from_iterator([TEXT] * 4, trainer)
    shutil.rmtree(folder)
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    about = {"eos_token": "<|endoftext|>", "chat_template": CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))


def theirs_of(pair, leaves):
    """A tensor of theirs out of our leaves by name."""
    return pair.to_hf([leaves[name] if pair.layer is None else leaves[name][pair.layer] for name in pair.leaves])


def lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("peer")
    made_model.make_workdir(folder / "run", {"model.vocab_size": 300}, scale=4.0)
    write_tokenizer(folder / "run/tokenizer")
    model = open_model(str(folder / "run"), say=lambda line: None)
    family = families.family_for(model.cfg)
    host = {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf)
            for path, leaf in jax.tree_util.tree_leaves_with_path(model.params)}  # fmt: skip
    pairs = families.tensors(family, model.cfg)
    np.savez(folder / "hf.npz", **{pair.hf_name: theirs_of(pair, host) for pair in pairs})
    config = families.write(family, model.cfg, {"eos_token_id": 0, "bos_token_id": None})
    (folder / "hf.json").write_text(json.dumps(config))
    rng = np.random.default_rng(0)
    words = TEXT.split(" ")[:-1]
    some = lambda low, high: " ".join(rng.choice(words, rng.integers(low, high)))
    lines(
        folder / "ask.jsonl",
        [dict(goal=some(3, 9), sol1=some(1, 6), sol2=some(1, 6), label=int(rng.integers(2))) for _ in range(24)],
    )
    lines(folder / "guess.jsonl", [{"text": some(4, 40)} for _ in range(16)])
    lines(folder / "read.jsonl", [{"text": some(1, 150)} for _ in range(6)])
    lines(folder / "write.jsonl", [{"text": some(3, 60)} for _ in range(6)])
    (folder / "tasks").mkdir()
    for name, settings in TASKS.items():
        made = TASK.format(name=name, file=folder / f"{name}.jsonl", lines=settings)
        (folder / f"tasks/{name}.yaml").write_text(made)
    requests = {
        "loglikelihood": [
            ["The cat", " sat"], ["The cat ", "sat"], ["The cat \n", "sat down"], ["", "The cat"],
            [some(60, 61), " again."], ["Où", " est le chat ?"],
        ],
        "loglikelihood_rolling": [[TEXT], [TEXT * 3], ["a"]],
        "generate_until": [[TEXT, {"until": ["\n"], "max_gen_toks": 12}],
                           ["The", {"until": ["cat"], "max_gen_toks": 20}],
                           [TEXT * 2, {"until": [], "max_gen_toks": 5, "do_sample": False}]],
    }  # fmt: skip
    (folder / "requests.json").write_text(json.dumps(requests))
    env = os.environ | {"PYTHONPATH": str(HERE.parent.parent), "HF_HOME": str(folder / "hub"), "XLA_FLAGS": ""}
    env["JAX_PLATFORMS"] = "cpu"
    done = subprocess.run(
        [PYTHON, HERE / "lm_eval_peer.py", folder], env=env, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((folder / "found.json").read_text())


def test_every_request_has_the_same_answer(found):
    ours, theirs = found["ours"]["answers"], found["theirs"]["answers"]
    for (our, our_greedy), (their, their_greedy) in zip(ours["loglikelihood"], theirs["loglikelihood"], strict=True):
        assert our == pytest.approx(their, rel=TOLERANCE) and our_greedy == their_greedy
    assert ours["loglikelihood_rolling"] == pytest.approx(theirs["loglikelihood_rolling"], rel=TOLERANCE)
    assert ours["generate_until"] == theirs["generate_until"]


@pytest.mark.parametrize("how", ["results", "chat"])
def test_every_task_has_the_same_result(found, how):
    ours, theirs = found["ours"][how], found["theirs"][how]
    assert ours.keys() == theirs.keys() == set(TASKS)
    compared = 0
    for task in TASKS:
        for name, value in theirs[task].items():
            if isinstance(value, float) and "stderr" not in name:
                assert ours[task][name] == pytest.approx(value, rel=TOLERANCE), (task, name)
                compared += 1
    assert compared == 8


def test_the_verb_says_the_same_with_tasks_and_with_files(found):
    theirs = found["theirs"]["results"]
    of_tasks, of_chat, of_files = found["verb"]
    wanted = found["theirs"]["chat"]["ask"]["acc_norm,none"]
    assert of_chat["evals/ask/acc_norm"] == pytest.approx(wanted, rel=TOLERANCE)
    assert json.loads(found["said"])["evals/ask/acc"] == of_tasks["evals/ask/acc"]  # and not a line that lm-eval prints
    for task, metric in [("ask", "acc"), ("ask", "acc_norm"), ("ask", "acc_bytes"), ("guess", "acc"),
                         ("guess", "perplexity"), ("read", "bits_per_byte")]:  # fmt: skip
        wanted = theirs[task][f"{metric},none"]
        assert of_tasks[f"evals/{task}/{metric}"] == pytest.approx(wanted, rel=TOLERANCE), (task, metric)
        assert of_files[f"evals/{task}/{metric}"] == pytest.approx(wanted, rel=TOLERANCE), (task, metric)
    for metric in ("acc_stderr", "acc_norm_stderr"):
        assert of_files[f"evals/ask/{metric}"] == pytest.approx(theirs["ask"][f"{metric},none"], rel=TOLERANCE)
