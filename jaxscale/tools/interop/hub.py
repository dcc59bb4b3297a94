"""Downloads from and uploads to the Hugging Face Hub. The token is read only from the environment."""

import dataclasses
import os
import pathlib
import re
from typing import Any

from jaxscale.runtime.checkpoint.config import HUB_NAME, check_hub_name
from jaxscale.runtime.checkpoint.periodic_export import ENDPOINT, TOKEN, check_endpoint, check_push
from jaxscale.system import packages, paths
from jaxscale.system.exits import BadInput, Exit, Stop
from jaxscale.system.redact import shown
from jaxscale.tools.interop import adapter_config, hf_checkpoint, tokenizer_files

PRIVATE = ".*"  # hidden files such as the journal are not pushed
ALLOW_PATTERNS = (  # repository files to download, without pickles
    hf_checkpoint.CONFIG, hf_checkpoint.INDEX, "*.safetensors", adapter_config.FILE, *tokenizer_files.FILES,
    f"{tokenizer_files.MORE_TEMPLATES}/*.jinja",
)  # fmt: skip
IGNORE_PATTERNS = ("consolidated*", "*/*.safetensors")  # weights in the original format, or in subfolders
ADDRESS = re.compile(
    rf"(?:https://(?:{'|'.join(map(re.escape, paths.HUBS))})/|hf://)?([^/]+/[^/@]+?)(?:/tree/([^/]+))?/?"
)


@dataclasses.dataclass(frozen=True)
class Fetched:
    """A Hub repository in the local cache."""

    name: str  # OWNER/NAME
    revision: str  # commit
    folder: str


def repository(name: str, revision: str | None = None) -> tuple[str, str | None] | None:
    """Returns (OWNER/NAME, revision), or None for a path. OWNER/NAME is a path if the folder OWNER exists."""
    found = ADDRESS.fullmatch(name)
    if found is None or not HUB_NAME.fullmatch(found[1]):
        return None
    if "://" not in name and paths.as_path(name.partition("/")[0]).exists():
        return None
    return found[1], revision or found[2]


def fetch(name: str, revision: str | None, flag: str) -> Fetched | None:
    """Downloads a repository. Returns None for a path. Raises BadInput without access, and Stop if this fails."""
    if (asked := repository(name, revision)) is None:
        if revision is not None and flag == "--from":
            raise BadInput(f"--revision={revision} applies to the Hub, but {flag}={name} is a path; omit --revision")
        return None
    name, revision = asked
    check_hub_name(flag.removeprefix("--"), name)
    if not packages.is_installed("huggingface_hub"):
        raise BadInput(f"{flag}={name}: huggingface_hub is not installed: pip install 'jaxscale[hub]'")
    token = os.environ.get(TOKEN, "").strip()
    check_endpoint(bool(token))
    import huggingface_hub
    from huggingface_hub import errors
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    refused = (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.GatedRepoError)
    try:
        folder = huggingface_hub.snapshot_download(
            name,
            revision=revision,
            token=token or False,
            allow_patterns=list(ALLOW_PATTERNS),
            ignore_patterns=list(IGNORE_PATTERNS),
        )
    except refused as error:
        at, reason = f" at {revision}" if revision else "", cause(error)[:200]
        raise BadInput(f"{flag}={name}{at} does not exist on the Hub, or {TOKEN} grants no access: {reason}") from None
    except Exception as error:  # depends on the HTTP client of huggingface_hub
        reason = f"{flag}={name}: download failed: {cause(error)}; run the same command again"
        raise Stop(Exit.STORAGE, reason) from None
    return Fetched(name, pathlib.Path(folder).name, folder)


def cause(error: Exception) -> str:
    """Returns the message of an error on one line, with secrets removed."""
    return " ".join(shown(str(error)).split())[:300]


def push_folder(folder: Any, name: str, message: str) -> str:
    """Uploads a folder as one commit and returns its URL. A new repository is private. Raises Stop if this fails."""
    check_push(name, folder)
    import huggingface_hub
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    api = huggingface_hub.HfApi(os.environ.get(ENDPOINT) or None, token=os.environ[TOKEN].strip())
    try:
        api.create_repo(name, private=True, exist_ok=True)
        done = api.upload_folder(
            repo_id=name, folder_path=os.fspath(folder), commit_message=message, ignore_patterns=[PRIVATE]
        )
    except Exception as error:  # depends on the HTTP client of huggingface_hub
        reason = f"{folder} is complete, but the upload to {name} failed: {cause(error)}; run the same command again"
        raise Stop(Exit.STORAGE, reason) from None
    return str(getattr(done, "commit_url", done))
