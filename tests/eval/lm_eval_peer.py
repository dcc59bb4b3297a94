"""What lm-eval finds of one model as transformers computes it, and of the same as ours, into a JSON file.

    python tests/eval/lm_eval_peer.py FOLDER        # FOLDER/run, hf.json, hf.npz, tasks/, requests.json -> found.json

Run by test_lm_eval_peer.py in an environment that has jaxscale, lm-eval, torch and transformers.
"""

import contextlib
import io
import json
import logging
import os
import pathlib
import sys

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import jax
import numpy as np
import torch
import transformers
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from jaxscale.api.inference import make_generator, open_model
from jaxscale.cli import evaluate
from jaxscale.runtime.eval import lm_eval_adapter
from jaxscale.runtime.eval.bits_per_byte import EvalReading
from jaxscale.runtime.eval.scorer import Scorer

CONTEXT, BATCH = 96, 4


def their_model(folder):
    """transformers' model with our parameters, as lm-eval wraps it."""
    config = transformers.LlamaConfig(**json.loads((folder / "hf.json").read_text()), attn_implementation="eager")
    model = transformers.LlamaForCausalLM(config)
    tensors = {name: torch.from_numpy(array.copy()) for name, array in np.load(folder / "hf.npz").items()}
    assert not model.load_state_dict(tensors, strict=False).unexpected_keys
    file = str(folder / "run/tokenizer/tokenizer.json")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=file, eos_token="<|endoftext|>")
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.chat_template = json.loads((folder / "run/tokenizer/tokenizer_config.json").read_text())["chat_template"]
    return HFLM(pretrained=model.eval(), tokenizer=tokenizer, batch_size=BATCH, max_length=CONTEXT, device="cpu")


def our_model(folder):
    """The same by our code."""
    model = open_model(str(folder / "run"))
    served = lm_eval_adapter.Served(
        EvalReading.of(model.saved_tokenizer.tokenizer, CONTEXT),
        model.saved_tokenizer,
        Scorer.of(model.sharded, 256),
        model.params,
        lambda rows, longest: make_generator(model, batch=rows, longest=longest),
        BATCH,
    )
    return lm_eval_adapter.adapter_class()(served)


def answers(model, requests):
    """What a model says to the requests of each kind."""
    found = {}
    for kind, arguments in requests.items():
        made = [Instance(kind, {}, tuple(args), number) for number, args in enumerate(arguments)]
        found[kind] = getattr(model, kind)(made)
    return found


def main(folder):
    """Asks both, and writes what they say."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    requests = json.loads((folder / "requests.json").read_text())
    tasks = sorted(path.stem for path in (folder / "tasks").glob("*.yaml"))
    manager = TaskManager(include_path=str(folder / "tasks"), include_defaults=False)
    found = {"tasks": tasks}
    how = dict(tasks=tasks, task_manager=manager, log_samples=False, bootstrap_iters=10)
    for name, model in (("theirs", their_model(folder)), ("ours", our_model(folder))):
        found[name] = {"answers": answers(model, requests), "results": simple_evaluate(model=model, **how)["results"]}
        chat = simple_evaluate(model=model, num_fewshot=1, apply_chat_template=True, fewshot_as_multiturn=True, **how)
        found[name]["chat"] = chat["results"]
    flags = [f"--workdir={folder}/run", f"--context={CONTEXT}", "--save"]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert evaluate.main([*flags, f"--lm_eval={','.join(tasks)}", f"--include_path={folder}/tasks", "--json"]) == 0
    found["said"] = said.getvalue()
    chat = ["--lm_eval=ask", f"--include_path={folder}/tasks", "--chat", "--num_fewshot=1"]
    assert evaluate.main([*flags, *chat]) == 0
    data = [f"--choice=ask={folder}/ask.jsonl", f"--cloze=guess={folder}/guess.jsonl"]
    assert evaluate.main([*flags, *data, f"--text=read={folder}/read.jsonl", f"--stride={CONTEXT}"]) == 0
    found["verb"] = [json.loads(line) for line in (folder / "run/evals.jsonl").read_text().splitlines()]
    (folder / "found.json").write_text(json.dumps(found, default=float))


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 2)
    main(pathlib.Path(sys.argv[1]))
