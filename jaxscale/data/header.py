"""The header of a token shard, NAME.json: what it holds, and whether it is as it was written."""

import json
import re
from pathlib import Path
from typing import Any

from jaxscale.system.digest import json_sha256
from jaxscale.system.exits import BadInput
from jaxscale.system.foreign import Unreadable, cannot_read, parse_json
from jaxscale.system.paths import read_bytes
from jaxscale.text.sources.files import SourceFile
from jaxscale.text.tokenizer.base import Tokenizer, begin_names

FORMAT, VERSION = "jaxscale-tokens", 2
OLDER = 1  # the same without the header's own sum
HEADER = {  # what a header holds, and as what
    "bin": str, "dtype": str, "num_tokens": int, "num_documents": int, "max_id": int, "text_bytes": int,
    "sources": list, "files": list, "skipped": dict, "sha256": dict, "tokenizer": dict,
}  # fmt: skip
INNER = {"sha256": ("bin", "idx", "src"), "tokenizer": ("name", "eos_token", "fingerprint")}
FILE = {"name": str, "source": str, "documents": int}
ENDINGS = {
    "bin": ".bin",
    "idx": ".idx",
    "src": ".src",
    "token_bytes": ".token_bytes.npy",
    "docs": ".docs.parquet",
    "trained": ".trained",
}
OWN = "json"  # among the sums: that of the header without it
SHA256 = re.compile(r"[0-9a-f]{64}")
WAY_OUT = "delete the folder to have it made again, or bring the file back"
DTYPES = ("uint8", "uint16", "uint32", "int64")  # written are the middle two; files of others may have the rest


def tokenizer_header(tokenizer: Tokenizer, name: str) -> dict[str, Any]:
    """A header's 'tokenizer'."""
    return {
        "name": name,
        "eos_token": tokenizer.eos_token,
        "begin_tokens": begin_names(tokenizer),
        "vocab_size": tokenizer.vocab_size,
        "fingerprint": tokenizer.fingerprint,
    }


def listed(file: SourceFile, documents: int) -> dict[str, Any]:
    """An entry of a header's 'files'."""
    return {"name": file.name, "source": file.source, "documents": documents}


def untold_header(file: dict[str, Any], eos_id: int | None, vocab_size: int = 0) -> dict[str, Any]:
    """What a header says of a file of ids that does not tell its tokenizer. file: its entry in 'files'."""
    tokenizer = {"name": "", "eos_token": "", "vocab_size": vocab_size, "fingerprint": ""}
    return {"tokenizer": tokenizer, "eos_id": eos_id, "text_bytes": 0, "skipped": {}, "files": [file]}


def sealed(header: dict[str, Any]) -> bytes:
    """The header as a file, with its own sum."""
    plain = json.loads(json.dumps(header))
    return json.dumps({**plain, "sha256": {**plain["sha256"], OWN: json_sha256(plain)}}, indent=1).encode()


def read_header(path: Path) -> dict[str, Any] | None:
    """The header that lies beside a .bin (or is `path` itself), or None if there is none of ours.

    Raises: BadInput naming the file if it is ours but of another version, lacks something or was changed; and where a
    .src beside it tells that there must be one.
    """
    path = path.with_suffix(".json")
    try:
        header = parse_json(read_bytes(path))
    except (FileNotFoundError, NotADirectoryError) as error:
        header, why = None, error.strerror
    except OSError as error:
        raise cannot_read(path, error) from None
    except Unreadable:
        raise
    except BadInput as error:
        header, why = None, str(error)
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        if path.with_suffix(".src").exists():
            why = why if header is None else f"its 'format' is not {FORMAT!r}"
            raise BadInput(f"{path} is not the header of the shard whose .src lies beside it ({why}); {WAY_OUT}")
        if path.exists() and not path.is_file():
            raise BadInput(f"{path} is a folder, a pipe or a device, and no file")
        return None
    if header.get("version") not in (OLDER, VERSION):
        raise BadInput(f"{path} has version {header.get('version')} of the format, this program reads {VERSION}")
    check_header(path, header)
    check_seal(path, header)
    return header


def check_header(path: Path, header: dict[str, Any]) -> None:
    """Raises BadInput for what is missing or of another kind."""
    for key, kind in HEADER.items():
        value = header.get(key)
        if value is None or type(value) is not kind or not all(name in value for name in INNER.get(key, ())):
            raise BadInput(f"{path} has no good {key!r}; {WAY_OUT}")
        if kind is int and value < 0:
            raise BadInput(f"{path} has no good {key!r}: it is {value}; {WAY_OUT}")
    good = {
        "bin": "\0" not in header["bin"],
        "dtype": header["dtype"] in DTYPES,
        "sources": all(isinstance(name, str) for name in header["sources"]),
        "files": all(map(is_listed, header["files"])),
        "skipped": all(type(number) is int for number in header["skipped"].values()),
        "tokenizer": all(isinstance(header["tokenizer"][name], str) for name in INNER["tokenizer"]),
        "sha256": all(isinstance(sum_, str) and SHA256.fullmatch(sum_) for sum_ in header["sha256"].values()),
        "eos_id": header.get("eos_id") is None or type(header["eos_id"]) is int,
    }
    if bad := [key for key, is_good in good.items() if not is_good]:
        raise BadInput(f"{path} has no good {bad[0]!r}; {WAY_OUT}")


def is_listed(file: Any) -> bool:
    """True for an entry of 'files'."""
    return isinstance(file, dict) and all(is_good(file.get(key), kind) for key, kind in FILE.items())


def is_good(value: Any, kind: type) -> bool:
    """True for a value of this kind; a number is never less than 0."""
    return type(value) is kind and (kind is not int or value >= 0)


def check_seal(path: Path, header: dict[str, Any]) -> None:
    """Raises BadInput for a header that is not as it was written; those of the older version do not tell."""
    sums = {name: sum_ for name, sum_ in header["sha256"].items() if name != OWN}
    if unknown := sorted(sums.keys() - ENDINGS.keys()):
        raise BadInput(f"{path} knows the sha256 of {unknown[0]!r}, which is no part of a shard; {WAY_OUT}")
    own = header["sha256"].get(OWN)
    if own != (json_sha256({**header, "sha256": sums}) if header["version"] == VERSION else None):
        raise BadInput(f"{path} was changed after it was written: its own sha256 is another; {WAY_OUT}")
    header["sha256"] = sums
