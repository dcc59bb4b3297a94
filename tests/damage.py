"""Damage to the files of a run's data: small corpora of each kind, and what can befall a file."""

import contextlib
import dataclasses
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np

from jaxscale.runtime.data.config import DataConfig
from jaxscale.runtime.data.manifest import write_manifest
from jaxscale.runtime.data.other_formats import index_bytes
from jaxscale.runtime.data.shard_writer import ShardWriter, lineage_table
from jaxscale.runtime.data.shards import changed_line, open_shard, shard_files
from jaxscale.runtime.text.document import Document
from jaxscale.runtime.text.tokenizer.load import ByteTokenizer
from jaxscale.system.digest import file_sha256
from jaxscale.system.exits import BadInput

WORDS = "the sea lay still and nobody knew where the wind had gone that morning".split()
OPENED = dict(seq_len=128, vocab_size=300, seed=0)
SECONDS = 30  # what waits for a FIFO waits for ever


def text(seed: int, words: int) -> str:
    """Some words, the same for the same seed."""
    return " ".join(WORDS[i] for i in np.random.default_rng(seed).integers(0, len(WORDS), words))


def write_shard(folder: Path, name: str, seed: int, sources=("web", "code")) -> None:
    """A shard of 24 documents with its lineage; of one size whatever the seed."""
    tokenizer = ByteTokenizer()
    writer = ShardWriter(folder, name, vocab_size=257, eos_id=256, sources=list(sources))
    documents = [Document(text(seed + i, 30)[: 80 + i], sources[i % 2], f"{name}.txt", i, f"{i:03}") for i in range(24)]
    for document in documents:
        writer.add(tokenizer.encode_many([document.text])[0], document.source)
    about = {"name": "bytes", "eos_token": "", "vocab_size": 257, "fingerprint": tokenizer.fingerprint}
    files = [{"name": name, "source": sources[0], "documents": 24}]
    header = {"tokenizer": about, "eos_id": 256, "text_bytes": 1, "skipped": {}, "files": files}
    writer.finish(tokenizer.token_bytes, header, lineage=lineage_table(documents))


def verify_shard(path: Path) -> None:
    """Raises BadInput naming the first file of the shard that is not what its header says."""
    open_shard(path)
    for _, file, sha256 in shard_files(path):
        if file_sha256(file) != sha256:
            raise BadInput(changed_line(file))


def make_set(folder: Path) -> dict:
    (folder / "other").mkdir()
    for number in range(2):
        write_shard(folder, f"part-{number}", 100 * number)
        write_shard(folder / "other", f"part-{number}", 7000 + 100 * number)
    for place in (folder, folder / "other"):
        write_manifest(place, ["part-0", "part-1"], recipe={})
    return dict(name="tokens", files=str(folder / "manifest.json"))


def make_shards(folder: Path) -> dict:
    for number in range(2):
        write_shard(folder, f"part-{number}", 100 * number)
    return dict(name="tokens", files=str(folder / "*.bin"))


def make_raw(folder: Path) -> dict:
    ids = np.concatenate([np.append(np.random.default_rng(i).integers(0, 256, 90), 256) for i in range(60)])
    ids.astype("<u2").tofile(folder / "ids.bin")
    return dict(name="tokens", files=str(folder / "ids.bin"), eos_id=256, token_dtype="uint16")


def make_megatron(folder: Path) -> dict:
    ids = np.random.default_rng(0).integers(0, 257, 60 * 90)
    ids.astype("<u2").tofile(folder / "pair.bin")
    (folder / "pair.idx").write_bytes(index_bytes(8, np.full(60, 90, np.int32), np.arange(61)))
    return dict(name="tokens", files=str(folder / "pair.bin"), eos_id=256)


def make_text(folder: Path) -> dict:
    lines = (json.dumps({"text": text(i, 30)}) + "\n" for i in range(48))
    (folder / "text.jsonl").write_text("".join(lines))
    (folder / "more.jsonl").write_text(json.dumps({"text": text(99, 300)}) + "\n")
    return dict(name="files", files=str(folder / "*.jsonl"))


def make_chat(folder: Path) -> dict:
    pairs = ({"prompt": text(i, 4), "completion": text(i + 500, 6)} for i in range(60))
    (folder / "chat.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return dict(name="chat", files=str(folder / "chat.jsonl"), val_fraction=0.2)


MAKERS = {
    "set": make_set, "shards": make_shards, "raw": make_raw, "megatron": make_megatron, "text": make_text,
    "chat": make_chat,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class World:
    """A corpus that can be put back: `folder` holds data/ and cache/, `kept` a copy of both."""

    folder: Path
    kept: Path
    settings: dict

    @property
    def cfg(self) -> DataConfig:
        return DataConfig(**{"val_fraction": 0.1, "cache_dir": str(self.folder / "cache"), **self.settings})

    def put_back(self) -> None:
        """Everything as it was, times of change included."""
        if self.folder.exists():
            for folder, _, _ in os.walk(self.folder):
                os.chmod(folder, 0o700)
            shutil.rmtree(self.folder)
        shutil.copytree(self.kept, self.folder)


def flip(place: Callable[[int], int]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[place(len(content))] ^= 1
        path.write_bytes(content)

    return damage


def same_time(damage: Callable[[Path], None]) -> Callable[[Path], None]:
    """The damage, after which the file tells the old time of change."""

    def hidden(path: Path) -> None:
        status = path.stat()
        damage(path)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

    return hidden


def cut(size: Callable[[int], int]) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, size(path.stat().st_size))


def append(path: Path) -> None:
    with open(path, "ab") as file:
        file.write(b"\1")


def instead(make: Callable[[Path], None]) -> Callable[[Path], None]:
    """Something else under the file's name."""

    def damage(path: Path) -> None:
        path.unlink()
        make(path)

    return damage


def outside(path: Path) -> None:
    """A link to a file elsewhere, of the same size and other content."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    elsewhere = path.parents[2] / "elsewhere"
    elsewhere.write_bytes(content)
    path.unlink()
    path.symlink_to(elsewhere)


def zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


DAMAGES: dict[str, Callable[[Path], None]] = {
    "head flipped": flip(lambda size: 0),
    "body flipped": flip(lambda size: size // 2),
    "tail flipped": flip(lambda size: size - 1),
    "flipped, time kept": same_time(flip(lambda size: size // 3)),
    "cut by a byte": cut(lambda size: size - 1),
    "cut in half": cut(lambda size: size // 2),
    "emptied": cut(lambda size: 0),
    "longer": append,
    "zeros": zeros,
    "deleted": Path.unlink,
    "a folder": instead(Path.mkdir),
    "a FIFO": instead(os.mkfifo),
    "a dangling link": instead(lambda path: path.symlink_to("nowhere")),
    "a link outside": outside,
}


class TooLong(BaseException):
    """No Exception, which somebody might catch."""


@contextlib.contextmanager
def in_time():
    """A BaseException where what is inside goes on for too long."""

    def too_late(*_):
        raise TooLong

    signal.signal(signal.SIGALRM, too_late)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)


def seen(corpus):
    """Everything that a run takes from the data, as one array, with the fingerprint that it records."""
    rows = len(corpus.train_rows)
    batch = corpus.batches(rows).batch(0)
    valid = [field for parts in corpus.valid_batches(8, 8) for field in (*parts[0][:5], *parts[1:])]
    return corpus.fingerprint, [np.asarray(field) for field in (*batch[:5], *valid)]
