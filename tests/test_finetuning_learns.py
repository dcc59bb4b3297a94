"""A small model really learns a real task from a few hundred conversations: which operation a line of GSM8K does.

pytest -n 0 -q -m soak tests/test_finetuning_learns.py
"""

import gzip
import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale import schema
from jaxscale.build import make_program
from jaxscale.cli import ckpt, sample
from jaxscale.config import RunConfig
from jaxscale.core.models.layers import merge_model, split_model
from jaxscale.core.models.model import logits, make_model
from jaxscale.program.budget import resolve_budget
from jaxscale.runtime.checkpoint.config import CheckpointConfig
from jaxscale.runtime.checkpoint.manager import Checkpoints
from jaxscale.runtime.run.opening import open_run, train_to_completion
from jaxscale.runtime.text.chat.chat_records import parse_record
from jaxscale.runtime.text.chat.spans import encode_rendered, render_conversation
from jaxscale.runtime.text.chat.template import Guard, load_template
from jaxscale.runtime.text.config import ChatConfig
from jaxscale.runtime.text.tokenizer.load import load_tokenizer

FILE = pathlib.Path(__file__).parents[2] / "shared/corpora/eval/gsm8k_train.jsonl.gz"
CALCULATION = re.compile(r"<<[0-9.]+([-+*/])[0-9.]+=[0-9.]+>>")
OPERATIONS = {"+": "addition", "-": "subtraction", "*": "multiplication", "/": "division"}
PAIRS, HELD, SEQ_LEN = 600, 100, 144

pytestmark = [pytest.mark.soak, pytest.mark.skipif(not FILE.exists(), reason=f"needs {FILE}")]

VALUES = dict(
    seq_len=SEQ_LEN,
    batch_tokens="16 rows",
    model=dict(
        name="llama", vocab_size=264, num_layers=2, embed_dim=64, num_heads=4, num_kv_heads=4, head_dim=16, mlp_dim=192,
        compute_dtype="float32",
    ),
    eval=dict(every_steps=50, num_rows=32),
    monitor=dict(progress="off", tensorboard=False),
)  # fmt: skip


def read():
    """(the questions, conversations: a line of an answer, and the operation in it)."""
    with gzip.open(FILE, "rt", encoding="utf-8") as file:
        records = [json.loads(line) for line in file]
    lines = [line for record in records for line in record["answer"].split("\n") if len(line) < 80]
    found = {line: OPERATIONS[match[1]] for line in lines if (match := CALCULATION.search(line))}
    turns = lambda line, name: [{"role": "user", "content": line}, {"role": "assistant", "content": name}]
    return [record["question"] for record in records], [turns(*pair) for pair in found.items()]


def train(folder, steps, lr, **more):
    values = schema.merge(VALUES, {"train_tokens": f"{steps} steps"})
    values["optim"] = dict(peak_lr=lr, min_lr=lr / 10, warmup_tokens="10%", weight_decay=0.0)
    cfg = schema.from_dict(RunConfig, values | more)
    train_to_completion(open_run(cfg, str(folder), lambda line: None))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    held = [line["validation/loss"] for line in lines if "validation/loss" in line]
    return cfg, [line["loss"] for line in lines if "loss" in line], held


def exact(folder, conversations):
    """The part of the conversations whose answer is greedily written to the letter, its end too."""
    values = schema.merge(VALUES, {"train_tokens": "1 steps"})
    cfg = schema.from_dict(RunConfig, values | {"data": {"name": "synthetic"}})
    program = make_program(cfg, resolve_budget(cfg, None))
    checkpoints = Checkpoints(folder / "checkpoints", CheckpointConfig())
    wanted = {"params": program.abstract_state.params}
    params = checkpoints.restore(checkpoints.latest_step(), wanted, partial=True)["params"]
    graphdef, _, _ = split_model(jax.eval_shape(lambda key: make_model(cfg.model, key=key), jax.random.key(0)))
    tokenizer = load_tokenizer("bytes")
    template, guard = load_template(tokenizer, ChatConfig()), Guard(tokenizer.special_ids)
    chats = [parse_record({"messages": messages}, ChatConfig(), "text") for messages in conversations]
    encoded = encode_rendered(tokenizer, [render_conversation(chat, template, guard) for chat in chats])
    tokens = np.zeros((len(encoded), SEQ_LEN + 1), np.int32)
    learned = np.zeros((len(encoded), SEQ_LEN + 1), bool)
    for row, (ids, marks) in enumerate(encoded):
        tokens[row, : len(ids)], tokens[row, len(ids)], learned[row, : len(marks)] = ids, tokenizer.eos_id, marks
    best = jax.jit(lambda params, tokens: jnp.argmax(logits(merge_model(graphdef, params), tokens), -1))
    right = np.asarray(best(params, tokens[:, :-1])) == tokens[:, 1:]
    return float((right | ~learned[:, 1:]).all(axis=1).mean())


def test_a_small_model_learns_a_task_from_600_conversations_with_all_parameters_and_with_adapters(tmp_path, capsys):
    def tell(line):
        with capsys.disabled():
            print(line)

    questions, conversations = read()
    (tmp_path / "questions.txt").write_text("\n".join(questions))
    held, used = conversations[:HELD], conversations[HELD : HELD + PAIRS]
    for name, part in (("held", held), ("used", used)):
        lines = [json.dumps({"messages": messages}) for messages in part]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    cache = dict(cache_dir=str(tmp_path / "cache"))
    text = dict(name="files", files=str(tmp_path / "questions.txt"), **cache)
    train(tmp_path / "base", 150, 3e-3, data=text)
    tell(f"\nbase: {exact(tmp_path / 'base', held):.0%} of {HELD} held-out answers exact")

    chat = dict(name="chat", files=str(tmp_path / "used.jsonl"), val_files=str(tmp_path / "held.jsonl"), **cache)
    begin = dict(from_path=str(tmp_path / "base"))
    for how, lr, lora in (("full", 2e-3, {}), ("lora", 5e-3, dict(rank=16, alpha=32.0))):
        _, losses, validation = train(tmp_path / how, 250, lr, data=chat, init=begin, lora=lora)
        folder = tmp_path / how
        asked, answer = held[0]
        flags = [f"--workdir={folder}", "--chat", f"--prompt={asked['content']}", "--temperature=0", "--num_tokens=16"]
        capsys.readouterr()  # what training has said
        assert sample.main(flags) == 0 and capsys.readouterr().out == f"{answer['content']}\n"
        if lora:
            assert ckpt.main(["merge_lora", f"--workdir={folder}", f"--to={tmp_path}/merged"]) == 0
            folder = tmp_path / "merged"
        found = exact(folder, held)
        told = f"held in {losses[0]:.2f} to {losses[-1]:.3f} nats, held out {validation[0]:.3f} to {validation[-1]:.3f}"
        tell(f"{how}: {told}; {found:.0%} of {HELD} held-out answers exact")
        assert losses[-1] < 0.3 * losses[0]
        assert validation[-1] < 0.7 * validation[0] and found > 0.9
