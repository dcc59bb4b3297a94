"""Folders of Hugging Face exports, and checks of a push to the Hub that need no conversion."""

import os
import urllib.parse
from typing import Any

from jaxscale.runtime.checkpoint.export_config import check_hub_name
from jaxscale.system import packages, paths
from jaxscale.system.exits import BadInput
from jaxscale.system.storage import is_loopback

CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"  # written last
JOURNAL = ".converting.json"
TOKEN, ENDPOINT = "HF_TOKEN", "HF_ENDPOINT"


def is_finished(folder: Any) -> bool:
    """True if the folder holds a finished export."""
    return any((folder / name).exists() for name in (CONFIG, ADAPTER_CONFIG)) and not (folder / JOURNAL).exists()


def check_endpoint(with_token: bool) -> None:
    """Raises BadInput if the token would be sent unencrypted."""
    address = urllib.parse.urlsplit(os.environ.get(ENDPOINT) or "https://huggingface.co")
    if with_token and address.scheme != "https" and not is_loopback(address.hostname or ""):
        raise BadInput(f"{ENDPOINT}={address.geturl()} would send the token unencrypted; give an https:// address")


def check_push(name: str, folder: Any = None) -> None:
    """Raises BadInput for a push that cannot succeed, before anything is converted."""
    check_hub_name("push", name)
    if folder is not None and paths.is_remote(folder):
        raise BadInput(f"--push sends a local folder, and {folder} is none; export to a disk and push from there")
    if not packages.is_installed("huggingface_hub"):
        raise BadInput("--push needs huggingface_hub: pip install 'jaxscale[hub]'")
    check_endpoint(True)
    if not os.environ.get(TOKEN, "").strip():
        raise BadInput(f"--push needs a token that may write, in the environment variable {TOKEN}, and nowhere else")
