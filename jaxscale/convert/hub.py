"""A folder sent to the Hugging Face Hub. The token comes from the environment alone, and is never written anywhere."""

import importlib.util
import os
import urllib.parse
from typing import Any

from jaxscale import paths
from jaxscale.convert.settings import check_hub_name
from jaxscale.exits import BadInput, Exit, Stop
from jaxscale.redact import shown

TOKEN, ENDPOINT = "HF_TOKEN", "HF_ENDPOINT"
PRIVATE = ".*"  # files that are ours alone, such as the journal


def check_push(name: str, folder: Any = None) -> None:
    """Raises BadInput for what can never be sent: found before anything is converted."""
    check_hub_name("push", name)
    if folder is not None and paths.is_remote(folder):
        raise BadInput(f"--push sends a local folder, and {folder} is none; export to a disk and push from there")
    if importlib.util.find_spec("huggingface_hub") is None:
        raise BadInput("--push needs huggingface_hub: pip install 'jaxscale[hub]'")
    address = urllib.parse.urlsplit(os.environ.get(ENDPOINT) or "https://huggingface.co")
    if address.scheme != "https" and not paths.is_loopback(address.hostname or ""):
        raise BadInput(f"{ENDPOINT}={address.geturl()} would send the token unencrypted; give an https:// address")
    if not os.environ.get(TOKEN, "").strip():
        raise BadInput(f"--push needs a token that may write, in the environment variable {TOKEN}, and nowhere else")


def push_folder(folder: Any, name: str, message: str) -> str:
    """Sends a folder as one commit; its address. A repository that is not there is made, private.

    Raises: Stop (STORAGE) where the Hub refuses or does not answer.
    """
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
    except Exception as error:  # of whatever client the package has below it
        cause = " ".join(shown(str(error)).split())[:300]
        raise Stop(
            Exit.STORAGE,
            f"{folder} is whole, and {name} on the Hub did not take it: {cause}; run the same command again",
        ) from None
    return str(getattr(done, "commit_url", done))
