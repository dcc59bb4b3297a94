"""One tokenizer of each kind that can be trained here, trained on a few lines."""

from jaxscale.runtime.text.tokenizer.bpe import train_bpe
from jaxscale.runtime.text.tokenizer.config import TrainTokenizerConfig
from jaxscale.runtime.text.tokenizer.huggingface import train_wordpiece
from jaxscale.runtime.text.tokenizer.sentencepiece import train_sentencepiece

SENTENCES = [
    "The mesh says where an axis lives, and the model what it means.",
    "  two spaces,\na line\tand a tab: naïve café 日本語 🙂 ",
    "12345 + 678 = 13023 isn't 42",
]
TEXT = [f"{sentence} number {number} of the lines" for number in range(60) for sentence in SENTENCES]


def make_tokenizers(folder):
    """{kind: its file}; the bytes have none."""
    folder.mkdir(parents=True)
    end = ["<|endoftext|>"]
    train_bpe(TEXT, 400, end, "gpt2", "tokenizers").save(str(folder / "bpe.json"))
    train_bpe(TEXT, 400, end, "cl100k", "tokenizers").save(str(folder / "newer.json"))
    content, _ = train_sentencepiece(TEXT, TrainTokenizerConfig(kind="unigram", vocab_size=330, eos_token="</s>"))
    (folder / "unigram.model").write_bytes(content)
    pieces = train_wordpiece(TEXT, TrainTokenizerConfig(kind="wordpiece", vocab_size=300))
    ids = pieces.get_vocab(with_added_tokens=True)
    (folder / "vocab.txt").write_text("\n".join(sorted(ids, key=ids.get)) + "\n")
    kinds = {"bpe": "bpe.json", "newer": "newer.json", "unigram": "unigram.model", "wordpiece": "vocab.txt"}
    return {kind: folder / file for kind, file in kinds.items()} | {"bytes": None}
