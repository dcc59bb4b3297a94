"""prepare: raw text to token shards."""

import contextlib
import errno
import os
import pathlib
from collections.abc import Iterator
from typing import Any

from jaxscale.corpus.indexes import publish_indexes
from jaxscale.corpus.prepare import engine
from jaxscale.corpus.prepare.config import PrepareConfig
from jaxscale.corpus.prepare.dedup import Executor
from jaxscale.corpus.prepare.examples import WEIGHTS
from jaxscale.corpus.prepare.local import LocalExecutor
from jaxscale.corpus.prepare.progress import Progress
from jaxscale.corpus.prepare.report import FACTS, PAGE
from jaxscale.corpus.publish import publish
from jaxscale.data.manifest import NAME as MANIFEST
from jaxscale.data.manifest import read_manifest
from jaxscale.system.exits import BadInput, Exit, Stop
from jaxscale.system.open_files import too_many
from jaxscale.system.paths import is_remote


def prepare(
    recipe: PrepareConfig,
    output: str,
    *,
    work_dir: str | None = None,
    keep_work: bool = False,
    strict: bool = False,
    executor: Executor | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """The manifest of the token shards that a recipe makes: `jaxscale prepare`. Killed, the same call goes on.

    Args: output: a folder, or gs://BUCKET/FOLDER with work_dir, the local folder in which it is made. keep_work: leaves
    that there. strict: raises BadInput where reading left out more than 1%, a file is broken, or the tokenizer loses
    more than 1% of the characters of samples. executor: where the work is done; all cores of this machine unless given.
    """
    if is_remote(output) and work_dir is None:
        raise BadInput(f"output={output} is remote; give work_dir=FOLDER, a local one with room for all shards")
    if executor is None:
        with LocalExecutor(os.cpu_count() or 1) as own:
            return prepare(
                recipe,
                output,
                work_dir=work_dir,
                keep_work=keep_work,
                strict=strict,
                executor=own,
                progress=progress,
            )
    folder, progress = pathlib.Path(work_dir or output).expanduser(), progress or Progress()
    with room_in(folder):
        engine.prepare(engine.make_plan(recipe), folder, executor, progress, keep_work=keep_work, strict=strict)
        publish_indexes(folder, recipe.rows, progress.say)  # what is there already is left alone
    if is_remote(output):
        progress.say(f"copying to {output}")
        learned = [WEIGHTS] if (folder / WEIGHTS).exists() else []
        publish(folder, output, extra_files=[FACTS, PAGE, *learned])
    return read_manifest(folder / MANIFEST).content


@contextlib.contextmanager
def room_in(folder: pathlib.Path) -> Iterator[None]:
    """Around work in a folder. Raises Stop with exit code 14 where the disk is full, BadInput where this user may not
    write there or the system allows too few open files."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise Stop(Exit.STORAGE, f"{folder} is full; make room, and run the same command again to go on") from None
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            place = error.filename or folder
            raise BadInput(f"{place}: {error.strerror}; use a folder that this user may write") from None
        if hint := too_many(error):
            raise BadInput(f"{error.filename or folder}: {error.strerror}{hint}") from None
        raise
