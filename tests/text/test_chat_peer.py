"""Ids and what is learned, as Transformers has them.

JAXSCALE_TORCH_PYTHON=E/bin/python pytest -m peer tests/text/test_chat_peer.py, E with transformers and jinja2
"""

import json
import os
import subprocess

import chat_tokenizers
import pytest
from test_chat import ASSISTANT, USER, encode

from jaxscale.runtime.text.tokenizer.load import load_tokenizer

PYTHON = os.environ.get("JAXSCALE_TORCH_PYTHON", "")
SCRIPT = """
import json, sys
from transformers import PreTrainedTokenizerFast
found = []
for file, template, messages in json.load(sys.stdin):
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=file, chat_template=template)
    made = tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask="endgeneration" in template
    )
    found.append([made["input_ids"], made.get("assistant_masks")])
print(json.dumps(found))
"""

pytestmark = [
    pytest.mark.peer,
    pytest.mark.skipif(not PYTHON, reason="JAXSCALE_TORCH_PYTHON names no Python with transformers"),
]


def test_conversations_become_the_ids_of_transformers_and_marked_turns_are_its_own(tmp_path):
    pytest.importorskip("jinja2", reason="the extra chat")
    talks = [[USER, ASSISTANT], [USER, ASSISTANT, USER, {"role": "assistant", "content": " hi\n\nthere  "}]]
    talks.append([{"role": "system", "content": "é 漢 <|im_en"}, USER, {"role": "assistant", "content": "1+1=2"}])
    asked, ours = [], []
    for name in ("CHATML", "FORGETFUL", "MARKED"):
        template = getattr(chat_tokenizers, name)
        path = chat_tokenizers.write_folder(tmp_path / name, template)
        for talk in talks:
            ids, learned = encode(load_tokenizer(path), talk)
            asked.append([path, template, talk])
            ours.append([ids.tolist(), learned[:-1].astype(int).tolist() if name == "MARKED" else None])
    ran = subprocess.run([PYTHON, "-c", SCRIPT], input=json.dumps(asked), capture_output=True, text=True, check=True)
    assert json.loads(ran.stdout) == ours
