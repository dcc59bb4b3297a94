"""The commands of all pages, and what each becomes when a test runs it."""

import functools

from doc_kinds import NOT_SHELL, kind_of
from shell_blocks import ROOT, blocks_of, commands_of, pages

PROGRAMS = (
    "jaxscale", "python", "python3", "pip", "pytest", "ruff", "launch/", ".ci/", "sbatch", "srun", "gcloud", "docker",
    "export", "touch", "hf", "for", "JAXSCALE_", "--config.",
)  # fmt: skip


@functools.cache
def blocks():
    return [block for path in pages() for block in blocks_of(path.relative_to(ROOT).as_posix(), path.read_text())]


def is_said_to_be_none(block):
    """Whether the table names the block as text or output."""
    return any(block.page == page and block.lines[0].startswith(start) for page, start in NOT_SHELL)


def is_shell(block):
    """Whether a program begins it."""
    return not is_said_to_be_none(block) and block.lines[0].startswith(PROGRAMS)


@functools.cache
def commands():
    return [command for block in blocks() if is_shell(block) for command in commands_of(block)]


def of_kind(name):
    """Those of a kind; what no line of the table fits is told by a test of its own."""
    return [command for command in commands() if (kind := kind_of(command.text)) and kind.name == name]


def changed(words, kind):
    """The words with what only a long run has replaced, and with the flags for a smaller one."""
    return [dict(kind.swap).get(word, word) for word in words] + list(kind.more)
