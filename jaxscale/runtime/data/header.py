"""The header of a token shard, NAME.json, and its validation."""

import json
import re
from pathlib import Path
from typing import Any

from jaxscale.runtime.text.sources.files import SourceFile
from jaxscale.runtime.text.tokenizer.base import Tokenizer, begin_names
from jaxscale.system.digest import json_sha256
from jaxscale.system.exits import BadInput
from jaxscale.system.foreign import Unreadable, cannot_read, parse_json
from jaxscale.system.paths import read_bytes

FORMAT, VERSION = "jaxscale-tokens", 2
OLD_VERSION = 1  # without the header's own sha256
HEADER_TYPES = {
    "bin": str, "dtype": str, "num_tokens": int, "num_documents": int, "max_id": int, "text_bytes": int,
    "sources": list, "files": list, "skipped": dict, "sha256": dict, "tokenizer": dict,
}  # fmt: skip
REQUIRED_KEYS = {"sha256": ("bin", "idx", "src"), "tokenizer": ("name", "eos_token", "fingerprint")}
FILE_TYPES = {"name": str, "source": str, "documents": int}
SUFFIXES = {
    "bin": ".bin",
    "idx": ".idx",
    "src": ".src",
    "token_bytes": ".token_bytes.npy",
    "docs": ".docs.parquet",
    "trained": ".trained",
}
HEADER_SUM = "json"  # key in "sha256": the hash of the header without this entry
SHA256 = re.compile(r"[0-9a-f]{64}")
FIX = "delete the folder so that it is created again, or restore the file"
DTYPES = ("uint8", "uint16", "uint32", "int64")  # ours are uint16 or uint32; imported files may have any


def tokenizer_header(tokenizer: Tokenizer, name: str) -> dict[str, Any]:
    """Returns the header's "tokenizer" entry."""
    return {
        "name": name,
        "eos_token": tokenizer.eos_token,
        "begin_tokens": begin_names(tokenizer),
        "vocab_size": tokenizer.vocab_size,
        "fingerprint": tokenizer.fingerprint,
    }


def file_entry(file: SourceFile, documents: int) -> dict[str, Any]:
    """Returns an entry of the header's "files"."""
    return {"name": file.name, "source": file.source, "documents": documents}


def unknown_tokenizer_header(file: dict[str, Any], eos_id: int | None, vocab_size: int = 0) -> dict[str, Any]:
    """Returns header entries for token ids of an unknown tokenizer. file: its entry in "files"."""
    tokenizer = {"name": "", "eos_token": "", "vocab_size": vocab_size, "fingerprint": ""}
    return {"tokenizer": tokenizer, "eos_id": eos_id, "text_bytes": 0, "skipped": {}, "files": [file]}


def encode_header(header: dict[str, Any]) -> bytes:
    """Returns the header as JSON, including its own sha256."""
    plain = json.loads(json.dumps(header))
    return json.dumps({**plain, "sha256": {**plain["sha256"], HEADER_SUM: json_sha256(plain)}}, indent=1).encode()


def read_header(path: Path) -> dict[str, Any] | None:
    """Returns the header next to a .bin, or at `path`; None if there is none of ours. Raises BadInput if invalid."""
    path = path.with_suffix(".json")
    try:
        header = parse_json(read_bytes(path))
    except (FileNotFoundError, NotADirectoryError) as error:
        header, reason = None, error.strerror
    except OSError as error:
        raise cannot_read(path, error) from None
    except Unreadable:
        raise
    except BadInput as error:
        header, reason = None, str(error)
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        if path.with_suffix(".src").exists():
            reason = reason if header is None else f"its 'format' is not {FORMAT!r}"
            raise BadInput(f"{path} is not a valid header, although its .src exists ({reason}); {FIX}")
        if path.exists() and not path.is_file():
            raise BadInput(f"{path} is a folder, a pipe or a device, not a file")
        return None
    if header.get("version") not in (OLD_VERSION, VERSION):
        raise BadInput(f"{path} has format version {header.get('version')}; this program reads version {VERSION}")
    check_header(path, header)
    sums = {name: sum_ for name, sum_ in header["sha256"].items() if name != HEADER_SUM}
    if unknown := sorted(sums.keys() - SUFFIXES.keys()):
        raise BadInput(f"{path} has a sha256 of {unknown[0]!r}, which is not a file of a shard; {FIX}")
    expected = json_sha256({**header, "sha256": sums}) if header["version"] == VERSION else None  # OLD_VERSION has none
    if header["sha256"].get(HEADER_SUM) != expected:
        raise BadInput(f"{path} was changed after it was written: its own sha256 does not match; {FIX}")
    return {**header, "sha256": sums}


def check_header(path: Path, header: dict[str, Any]) -> None:
    """Raises BadInput for a missing entry or one of the wrong type."""
    for key, kind in HEADER_TYPES.items():
        value = header.get(key)
        if value is None or type(value) is not kind or not all(name in value for name in REQUIRED_KEYS.get(key, ())):
            raise BadInput(f"{path} has an invalid {key!r}; {FIX}")
        if kind is int and value < 0:
            raise BadInput(f"{path} has an invalid {key!r}: it is {value}; {FIX}")
    checks = {
        "bin": "\0" not in header["bin"],
        "dtype": header["dtype"] in DTYPES,
        "sources": all(isinstance(name, str) for name in header["sources"]),
        "files": all(
            isinstance(file, dict) and all(has_type(file.get(key), kind) for key, kind in FILE_TYPES.items())
            for file in header["files"]
        ),
        "skipped": all(type(number) is int for number in header["skipped"].values()),
        "tokenizer": all(isinstance(header["tokenizer"][name], str) for name in REQUIRED_KEYS["tokenizer"]),
        "sha256": all(isinstance(sum_, str) and SHA256.fullmatch(sum_) for sum_ in header["sha256"].values()),
        "eos_id": header.get("eos_id") is None or type(header["eos_id"]) is int,
    }
    if bad := [key for key, value in checks.items() if not value]:
        raise BadInput(f"{path} has an invalid {bad[0]!r}; {FIX}")


def has_type(value: Any, kind: type) -> bool:
    """Returns True for a value of this type; an int must be at least 0."""
    return type(value) is kind and (kind is not int or value >= 0)
