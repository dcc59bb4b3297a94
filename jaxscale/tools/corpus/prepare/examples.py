"""Trains the quality classifier on its examples before the first pass, and saves it in the work folder."""

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
from jaxscale.tools.corpus.prepare.block_files import mark_done, read_done
from jaxscale.tools.corpus.prepare.config import PrepareConfig
from jaxscale.tools.corpus.prepare.progress import Progress

WEIGHTS = "classifier.weights"


def example_files(cfg: PrepareConfig, say: Callable[[str], None] = ignore_line) -> list[str]:
    """Returns the input files of the classifier: its examples, or its weights.

    say: as in list_files. Raises BadInput for missing files, and for a file that is in both good and bad examples.
    """
    classifier_cfg = cfg.classifier
    if "classifier" not in cfg.stages:
        return []
    if classifier_cfg.weights:
        if not (path := pathlib.Path(classifier_cfg.weights).expanduser()).is_file():
            raise BadInput(
                f"classifier.weights={classifier_cfg.weights} does not exist; name another, or examples to train on"
            )
        return [str(path)]
    good, bad = ([file.path for file in list_examples(cfg, kind, say)] for kind in ("good", "bad"))
    same = {file_identity(path): path for path in good}
    if twice := [path for path in bad if file_identity(path) in same]:
        raise BadInput(
            f"{twice[0]} of classifier.bad is in classifier.good, as {same[file_identity(twice[0])]}; "
            "remove it from one"
        )
    return [*good, *bad]


def list_examples(cfg: PrepareConfig, kind: str, say: Callable[[str], None] = ignore_line) -> list[SourceFile]:
    """Returns the files of the good or the bad examples. say: as in list_files."""
    files, problems = list_files(getattr(cfg.classifier, kind), f"classifier.{kind}", kind, say=say)
    problems += filter(None, map(not_documents_problem, files))
    if problems:
        raise BadInput(problems[0])
    return files


def ensure_classifier(cfg: PrepareConfig, folder: pathlib.Path, progress: Progress) -> dict[str, Any] | None:
    """Trains the classifier unless it is done. Returns the facts of train_classifier, or None if none is trained."""
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
                progress.say(f"classifier: of its examples {lost.line}")
        write_bytes_atomic(path, content)
        mark_done(done, facts, [path])
        progress.end()
    progress.say(
        f"classifier: of held-out examples {facts['accuracy']:.1%} are classified correctly at 0.5 (balanced "
        f"accuracy), ROC AUC {facts['auc']:.3f}"
    )
    return facts


def read_texts(cfg: PrepareConfig, files: Sequence[SourceFile], seen: Counter) -> Iterator[str]:
    """Yields the texts of the files, read with the recipe's settings. seen: counts documents, bytes and skips."""
    for file in files:
        for document in read_file(file, cfg.read, seen):
            seen.update(documents=1, bytes=document.size)
            yield document.text


def with_weights(cfg: PrepareConfig, folder: pathlib.Path) -> PrepareConfig:
    """Returns the recipe of the passes: with the weights in the work folder, if they were trained on examples."""
    if "classifier" not in cfg.stages or cfg.classifier.weights:
        return cfg
    classifier_cfg = dataclasses.replace(cfg.classifier, weights=str(folder / WEIGHTS), good=(), bad=())
    return dataclasses.replace(cfg, classifier=classifier_cfg)
