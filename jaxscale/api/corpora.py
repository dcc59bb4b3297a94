"""prepare(): token shards from raw text."""

import contextlib
import errno
import os
import pathlib
from collections.abc import Iterator
from typing import Any

from jaxscale.runtime.data.manifest import NAME as MANIFEST
from jaxscale.runtime.data.manifest import read_manifest
from jaxscale.system.exits import BadInput, Exit, Stop
from jaxscale.system.open_files import too_many
from jaxscale.system.paths import is_remote
from jaxscale.tools.corpus.prepare import engine
from jaxscale.tools.corpus.prepare.config import PrepareConfig
from jaxscale.tools.corpus.prepare.dedup import Executor
from jaxscale.tools.corpus.prepare.examples import WEIGHTS
from jaxscale.tools.corpus.prepare.local import LocalExecutor
from jaxscale.tools.corpus.prepare.preparation_page import FACTS, PAGE
from jaxscale.tools.corpus.prepare.progress import PrepareProgress
from jaxscale.tools.corpus.publish import publish, publish_indexes


def prepare(
    recipe: PrepareConfig,
    output: str,
    *,
    work_dir: str | None = None,
    keep_work: bool = False,
    strict: bool = False,
    executor: Executor | None = None,
    progress: PrepareProgress | None = None,
) -> dict[str, Any]:
    """Makes the token shards of a recipe, like `jaxscale prepare`. Returns their manifest.

    Resumes after an interruption. output: a folder, or gs://BUCKET/FOLDER, which also requires the local folder
    work_dir. keep_work: whether to keep work_dir. strict: whether to raise BadInput for a broken file, or if more than
    1% of the text is skipped or the tokenizer loses more than 1% of the sampled characters. executor: runs the tasks;
    by default on all cores of this machine.
    """
    if is_remote(output) and work_dir is None:
        raise BadInput(f"output={output} is remote; give work_dir=FOLDER, a local folder with space for all shards")
    folder, progress = pathlib.Path(work_dir or output).expanduser(), progress or PrepareProgress()
    how = dict(keep_work=keep_work, strict=strict)
    with storage_errors(folder):
        plan = engine.make_plan(recipe)
        with contextlib.nullcontext(executor) if executor else LocalExecutor(os.cpu_count() or 1) as tasks:
            engine.prepare(plan, folder, tasks, progress, **how)
        publish_indexes(folder, recipe.rows, progress.say)  # existing indexes are not changed
    if is_remote(output):
        progress.say(f"copying to {output}")
        learned = [WEIGHTS] if (folder / WEIGHTS).exists() else []
        publish(folder, output, extra_files=[FACTS, PAGE, *learned])
    return read_manifest(folder / MANIFEST).content


@contextlib.contextmanager
def storage_errors(folder: pathlib.Path) -> Iterator[None]:
    """Converts OSError to Stop(STORAGE) for a full disk, or BadInput for permissions or too many open files."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise Stop(
                Exit.STORAGE, f"no space is left for {folder}; free disk space, then run the same command to resume"
            ) from None
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            path = error.filename or folder
            raise BadInput(f"{path}: {error.strerror}; choose a folder that this user can write") from None
        if hint := too_many(error):
            raise BadInput(f"{error.filename or folder}: {error.strerror}{hint}") from None
        raise
