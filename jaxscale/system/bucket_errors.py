"""Errors of the bucket service, with advice on how to fix them."""

import http.client
import re
import urllib.error

from jaxscale.system.exits import BadInput

TRANSIENT = {408, 429, 500, 502, 503, 504}  # cloud.google.com/storage/docs/retry-strategy
NEEDED = {  # {operation: (permissions, minimal role)}; cloud.google.com/storage/docs/access-control
    "read": ("storage.objects.get", "Storage Object Viewer"),
    "written": ("storage.objects.create and storage.objects.delete", "Storage Object User"),
    "listed": ("storage.objects.list", "Storage Object Viewer"),
    "deleted": ("storage.objects.delete", "Storage Object User"),
}
PERMISSION = re.compile(r"storage\.(objects|buckets|folders|managedFolders|multipartUploads)\.[a-zA-Z]+")
MAX_REFUSAL_BYTES = 1 << 16  # maximum length of a response that is searched for a permission


class Transient(Exception):
    """Temporary fault. `wait` is the delay that the server requested, in seconds."""

    def __init__(self, cause: str, wait: float = 0.0):
        super().__init__(cause)
        self.wait = wait


class Forbidden(BadInput, OSError):
    """The machine's account lacks a permission, which is in the message."""


class Unreachable(BadInput, OSError):
    """The service did not respond, even after all retries. A later attempt may succeed."""


class Changed(Exception):
    """The object does not have the expected generation."""


def refusal(error: urllib.error.HTTPError, url: str, what: str, wait: float) -> Exception:
    """Returns the exception for an error response. `wait` is the delay in its Retry-After header, in seconds."""
    if error.code in TRANSIENT:
        return Transient(f"{error.code} {error.reason}", wait)
    if error.code == 404:
        return FileNotFoundError(f"{url} does not exist (404); check the name, or publish the dataset again")
    if error.code in (401, 403):
        try:
            text = error.read(MAX_REFUSAL_BYTES).decode("utf-8", "replace")
        except (OSError, http.client.HTTPException):
            text = ""
        needed, role = NEEDED[what]
        lack = f"its account needs {missing_permission(text) or needed}, for example through the role {role}"
        if error.code == 401:
            lack = "it has no valid credentials; run gcloud auth application-default login"
        return Forbidden(f"{url} cannot be {what}: this machine has no permission ({error.code}); {lack}")
    if error.code == 412:
        return Changed(url)
    if error.code == 416:
        return BadInput(f"{url} is shorter than expected, because the object was replaced")
    if error.code == 410:
        return BadInput(f"{url}: the service aborted the upload (410); run the command again")
    return BadInput(f"{url} cannot be {what}: the service returned {error.code} {error.reason}")


def missing_permission(text: str) -> str | None:
    """Returns the missing permission in a response, such as storage.objects.create, or None."""
    found = PERMISSION.search(text.replace("storage.googleapis.com", ""))
    return found.group() if found else None
