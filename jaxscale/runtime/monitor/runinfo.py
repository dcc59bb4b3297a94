"""Package versions and git commit of a run, for config.json. Contains no host or user name."""

import importlib.metadata
import os
import pathlib
import platform
import subprocess

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


def versions() -> dict[str, str | None]:
    """Returns {package: version} without imports. The version is None if the package is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def git_commit(folder: str | pathlib.Path | None = None) -> str | None:
    """Returns the commit of `folder` (default: this package), with '-dirty' if files differ; None if not in git."""
    source = pathlib.Path(folder) if folder else pathlib.Path(__file__).resolve().parent
    # a package installed in an environment inside another repository is not tracked by it
    tracked = git(source, "ls-files", "--error-unmatch", ".")
    commit = git(source, "rev-parse", "HEAD")
    if commit is None or not tracked:
        return None
    changed = git(source, "status", "--porcelain", "--untracked-files=no")
    return f"{commit}-dirty" if changed else commit


def git(folder: pathlib.Path, *arguments: str) -> str | None:
    """Returns the output of git, or None if git is missing, times out or fails."""
    # inside a git hook GIT_DIR names another repository
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", timeout=10, env=env)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def run_info() -> dict[str, object]:
    """Returns {versions, git_commit}. Takes about 20 ms."""
    return {"versions": versions(), "git_commit": git_commit()}
