"""A byte-level tokenizer.json with ChatML's tokens in a folder, and templates written for these tests."""

import json

import tokenizers
from tokenizers import decoders, models

from jaxscale.runtime.text.tokenizer.bpe import byte_alphabet, make_pre_tokenizer

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] | trim }}"
    "{{ '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Drops what was thought in all turns but the last, as Qwen3's does.
FORGETFUL = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.role == 'assistant' and loop.last %}{{ '<think>' + message.content }}{% else %}"
    "{{ message.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for message in messages %}{% if message.role == 'assistant' %}{{ 'A:' }}{% generation %}{{ message.content }}"
    "{{ '<|im_end|>' }}{% endgeneration %}{% else %}{{ 'U:' + message.content + '\n' }}{% endif %}{% endfor %}"
)


def write_folder(folder, template=None, **about):
    """Writes tokenizer.json, and tokenizer_config.json where something is to stand in it; returns the former's path."""
    alphabet = sorted(byte_alphabet())
    vocab = {letter: i for i, letter in enumerate(alphabet)} | {"hi": len(alphabet)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("h", "i")]))
    tokenizer.pre_tokenizer, tokenizer.decoder = make_pre_tokenizer("gpt2"), decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    folder.mkdir(exist_ok=True)
    path = folder / "tokenizer.json"
    path.write_text(tokenizer.to_str())
    if template is not None or about:
        about |= {} if template is None else {"chat_template": template}
        (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return str(path)
