"""Trains the quality classifier before the first pass and saves it in the work folder."""

import dataclasses
import pathlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxscale.runtime.text.sources.files import (
    SourceFile,
    file_identity,
    ignore_line,
    list_files,
    not_documents_problem,
)
from jaxscale.runtime.text.sources.part import summarize_losses
from jaxscale.runtime.text.sources.read import read_file
from jaxscale.system.exits import BadInput
from jaxscale.system.paths import write_bytes_atomic
from jaxscale.tools.corpus.curate.classifier import train_classifier
from jaxscale.tools.corpus.prepare.config import PrepareConfig
from jaxscale.tools.corpus.prepare.lookup import mark_done, read_done
from jaxscale.tools.corpus.prepare.progress import PrepareProgress

WEIGHTS = "classifier.weights"


def example_files(cfg: PrepareConfig, say: Callable[[str], None] = ignore_line) -> list[str]:
    """Returns the classifier's example files, or its weights file. Raises BadInput for missing or duplicate files."""
    if "classifier" not in cfg.stages:
        return []
    if weights := cfg.classifier.weights:
        if not (path := pathlib.Path(weights).expanduser()).is_file():
            raise BadInput(f"classifier.weights={weights} does not exist; fix it, or use classifier.good and .bad")
        return [str(path)]
    good, bad = ([file.path for file in list_examples(cfg, kind, say)] for kind in ("good", "bad"))
    same = {file_identity(path): path for path in good}
    for path in bad:
        if other := same.get(file_identity(path)):
            raise BadInput(f"{path} is in classifier.bad and in classifier.good (as {other}); remove it from one")
    return [*good, *bad]


def list_examples(cfg: PrepareConfig, kind: str, say: Callable[[str], None] = ignore_line) -> list[SourceFile]:
    """Returns the files of the 'good' or 'bad' examples. `say`: see list_files."""
    files, problems = list_files(getattr(cfg.classifier, kind), f"classifier.{kind}", kind, say=say)
    problems += filter(None, map(not_documents_problem, files))
    if problems:
        raise BadInput(problems[0])
    return files


def ensure_classifier(cfg: PrepareConfig, folder: pathlib.Path, progress: PrepareProgress) -> dict[str, Any] | None:
    """Trains the classifier, unless this was done before. Returns its metrics, or None if the recipe trains none."""
    if "classifier" not in cfg.stages or cfg.classifier.weights:
        return None
    path, done = folder / WEIGHTS, folder / f"{WEIGHTS}.done.json"
    if (facts := read_done(done)) is None:
        progress.begin("training the classifier", 1)
        seen: Counter = Counter()
        good, bad = (read_texts(cfg, list_examples(cfg, kind), seen) for kind in ("good", "bad"))
        try:
            content, facts = train_classifier(good, bad, cfg.classifier)
        finally:
            if lost := summarize_losses(seen, seen["documents"], seen["bytes"], cfg.read.where):
                progress.say(f"classifier examples: {lost.line}")
        write_bytes_atomic(path, content)
        mark_done(done, facts, [path])
        progress.end()
    correct, auc = f"{facts['accuracy']:.1%} balanced accuracy at threshold 0.5", f"ROC AUC {facts['auc']:.3f}"
    progress.say(f"classifier, on held-out examples: {correct}, {auc}")
    return facts


def read_texts(cfg: PrepareConfig, files: Sequence[SourceFile], seen: Counter) -> Iterator[str]:
    """Yields the texts of the files. Counts documents, bytes and skipped records in `seen`."""
    for file in files:
        for document in read_file(file, cfg.read, seen):
            seen.update(documents=1, bytes=document.size)
            yield document.text


def with_weights(cfg: PrepareConfig, folder: pathlib.Path) -> PrepareConfig:
    """Returns the recipe, with classifier.weights set to the trained weights if the recipe trains a classifier."""
    if "classifier" not in cfg.stages or cfg.classifier.weights:
        return cfg
    classifier_cfg = dataclasses.replace(cfg.classifier, weights=str(folder / WEIGHTS), good=(), bad=())
    return dataclasses.replace(cfg, classifier=classifier_cfg)
