"""Trains the learned filter on its examples before the first pass, and keeps it in the work folder."""

import dataclasses
import pathlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxscale.corpus.curate.classifier import train_classifier
from jaxscale.corpus.prepare.blocks import mark_done, read_done
from jaxscale.corpus.prepare.config import PrepareConfig
from jaxscale.corpus.prepare.progress import Progress
from jaxscale.system.exits import BadInput
from jaxscale.system.paths import write_bytes_atomic
from jaxscale.text.sources.files import SourceFile, identity, ignored, list_files, no_text_problem
from jaxscale.text.sources.left_out import left_out
from jaxscale.text.sources.read import read_file

WEIGHTS = "classifier.weights"


def example_files(cfg: PrepareConfig, say: Callable[[str], None] = ignored) -> list[str]:
    """The files that the learned filter is made of: its examples, or its weights.

    say: as of list_files. Raises BadInput for missing ones, and for a file of good examples that is also of bad ones.
    """
    learned = cfg.classifier
    if "classifier" not in cfg.stages:
        return []
    if learned.weights:
        if not (path := pathlib.Path(learned.weights).expanduser()).is_file():
            raise BadInput(
                f"classifier.weights={learned.weights} does not exist; name another, or examples to train on"
            )
        return [str(path)]
    good, bad = ([file.path for file in files_of(cfg, kind, say)] for kind in ("good", "bad"))
    same = {identity(path): path for path in good}
    if twice := [path for path in bad if identity(path) in same]:
        raise BadInput(
            f"{twice[0]} of classifier.bad is in classifier.good, as {same[identity(twice[0])]}; take it out of one"
        )
    return [*good, *bad]


def files_of(cfg: PrepareConfig, kind: str, say: Callable[[str], None] = ignored) -> list[SourceFile]:
    """The files of the good or of the bad examples. say: as of list_files."""
    files, problems = list_files(getattr(cfg.classifier, kind), f"classifier.{kind}", kind, say=say)
    problems += filter(None, map(no_text_problem, files))
    if problems:
        raise BadInput(problems[0])
    return files


def trained_filter(cfg: PrepareConfig, folder: pathlib.Path, progress: Progress) -> dict[str, Any] | None:
    """What train_classifier says of the model that it has left in the work folder; None where none is to be trained."""
    if "classifier" not in cfg.stages or cfg.classifier.weights:
        return None
    path, done = folder / WEIGHTS, folder / f"{WEIGHTS}.done.json"
    if (facts := read_done(done)) is None:
        progress.begin("training the classifier", 1)
        seen: Counter = Counter()
        good, bad = (texts(cfg, files_of(cfg, kind), seen) for kind in ("good", "bad"))
        try:
            content, facts = train_classifier(good, bad, cfg.classifier)
        finally:
            if lost := left_out(seen, seen["documents"], seen["bytes"], cfg.read.where):
                progress.say(f"classifier: of its examples {lost.line}")
        write_bytes_atomic(path, content)
        mark_done(done, facts, [path])
        progress.end()
    progress.say(
        f"classifier: of held-out examples {facts['accuracy']:.1%} are told right at 0.5 (each kind counts the same), "
        f"ROC AUC {facts['auc']:.3f}"
    )
    return facts


def texts(cfg: PrepareConfig, files: Sequence[SourceFile], seen: Counter) -> Iterator[str]:
    """The texts of the files, read by the settings of the recipe. seen: counts documents, bytes, what is skipped."""
    for file in files:
        for document in read_file(file, cfg.read, seen):
            seen.update(documents=1, bytes=document.size)
            yield document.text


def with_weights(cfg: PrepareConfig, folder: pathlib.Path) -> PrepareConfig:
    """The recipe as the passes run it: with the weights in the work folder, where they were trained on examples."""
    if "classifier" not in cfg.stages or cfg.classifier.weights:
        return cfg
    learned = dataclasses.replace(cfg.classifier, weights=str(folder / WEIGHTS), good=(), bad=())
    return dataclasses.replace(cfg, classifier=learned)
