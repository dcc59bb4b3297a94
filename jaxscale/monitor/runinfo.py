"""Which versions and which source made a run: what goes into config.json. Names no host and no person."""

import importlib.metadata
import os
import pathlib
import platform
import subprocess

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


def versions() -> dict[str, str | None]:
    """{package: version} read from the installed metadata, without importing any of them; None if not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def git_commit(folder: str | pathlib.Path | None = None) -> str | None:
    """The commit of the source tree, with '-dirty' if tracked files differ from it; None outside a git checkout.

    Args: folder: a folder of the tree; this package's own by default.
    """
    here = pathlib.Path(folder) if folder else pathlib.Path(__file__).resolve().parent
    # a package installed into an environment that happens to lie in somebody's repository has no commit of its own
    tracked = git(here, "ls-files", "--error-unmatch", ".")
    commit = git(here, "rev-parse", "HEAD")
    if commit is None or not tracked:
        return None
    changed = git(here, "status", "--porcelain", "--untracked-files=no")
    return f"{commit}-dirty" if changed else commit


def git(folder: pathlib.Path, *arguments: str) -> str | None:
    """What git prints, or None if it is missing, slow, or says no."""
    # a git hook around this process names its own repository in GIT_DIR, which would answer for the wrong one
    outside = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", timeout=10, env=outside)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def run_info() -> dict[str, object]:
    """{versions, git_commit}: takes about 20 ms."""
    return {"versions": versions(), "git_commit": git_commit()}
