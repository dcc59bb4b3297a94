"""The true cause of a storage error as one short line; Orbax reports the same through pages of tracebacks."""

import re

MAX_LETTERS = 240
# what operating systems and object stores call the causes that people can do something about
TELLING = re.compile(
    r"(No space left on device|Disk quota exceeded|File too large|Read-only file system|Permission denied"
    r"|Input/output error|Stale file handle|Too many open files|PERMISSION_DENIED|UNAUTHENTICATED|RESOURCE_EXHAUSTED"
    r"|DATA_LOSS|Too many requests)"
)


def short_cause(error: BaseException) -> str:
    """The most telling message in the error's chain, one line of at most MAX_LETTERS letters."""
    chain = list(errors_behind(error))
    for link in chain:
        if isinstance(link, OSError) and link.strerror:
            return clip(f"{link.strerror}: {link.filename}" if link.filename else link.strerror)
    for link in chain:
        if found := TELLING.search(str(link)):
            return clip(found.group())
    root = chain[-1]
    return clip(f"{type(root).__name__}: {root}" if str(root).strip() else type(root).__name__)


def errors_behind(error: BaseException):
    """Yields the error, what it holds if it is a group, and what caused it, each once."""
    pending, seen = [error], set()
    while pending:
        link = pending.pop(0)
        if id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        pending += list(getattr(link, "exceptions", ()))
        pending += [behind for behind in (link.__cause__, link.__context__) if behind is not None]


def clip(text: str) -> str:
    """The text on one line, shortened."""
    line = " ".join(text.split())
    return line if len(line) <= MAX_LETTERS else line[: MAX_LETTERS - 3] + "..."
