"""Readers of evaluation items (multiple-choice questions, and texts whose end is predicted) in published files.

The prompts are equal to those of the lm-eval tasks with these names (Gao et al., version 0.4.13 of
github.com/EleutherAI/lm-evaluation-harness), so that results can be compared with published results:

    PIQA     goal, sol1, sol2, label                       'Question: GOAL\\nAnswer:' + ' SOLUTION'
    SciQ     support, question, distractor1 to 3,          'SUPPORT\\nQuestion: QUESTION\\nAnswer:' + ' ANSWER'
             correct_answer
    ARC      question, choices {text, label}, answerKey    'Question: QUESTION\\nAnswer:' + ' CHOICE'
    LAMBADA  text                                          all but the last word + ' WORD'
    own      context, choices, answer (a number from 0, or the choice itself)
             context, target
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxscale.runtime.text.sources.files import list_files
from jaxscale.runtime.text.sources.part import BYTES
from jaxscale.runtime.text.sources.records import ENDINGS, Damage, kind_of, read_records
from jaxscale.system.exits import BadInput

MAX_ITEM_CHARACTERS = 32 << 20  # the context counts once per answer
MAX_SHOWN = 200  # characters of a value in a message


class EvalItem(NamedTuple):
    """A context and its possible continuations; context + continuation is a text."""

    name: str  # FILE:LINE or FILE:ROW
    context: str
    continuations: tuple[str, ...]
    answers: tuple[str, ...]  # the continuations without the space that joins them to the context
    right: int  # index of the right continuation


def check_item_files(pattern: str, setting: str) -> list[Path]:
    """Returns the files of a glob. Raises BadInput if there are none, or if a file has an unsupported type."""
    found, problems = list_files(pattern, setting, "items")
    if problems:
        raise BadInput(problems[0])
    for file in found:
        if kind_of(Path(file.path)) not in ENDINGS or Path(file.path).is_dir():
            raise BadInput(
                f"{setting}={file.path} must be .jsonl (also .gz or .zst), .parquet or .arrow, with one item per row"
            )
    return [Path(file.path) for file in found]


@dataclasses.dataclass
class SkippedItems:
    """Number of items that an evaluation skips, and the first error."""

    damaged: Damage = "stop"
    counts: Counter = dataclasses.field(default_factory=Counter)  # {reason: number}
    first: str = ""

    def add(self, error: BadInput) -> None:
        """Counts a skipped item, or raises the error with damaged='stop'."""
        if self.damaged == "stop":
            raise error from None
        self.first = self.first or str(error)
        self.counts["no item"] += 1

    @property
    def count(self) -> int:
        """Number of skipped items, lines and files."""
        return sum(number for reason, number in self.counts.items() if reason != BYTES)

    def __str__(self) -> str:
        """Returns ', 3 left out (REASON)', or '' if none were skipped."""
        reasons = self.first or ", ".join(f"{reason} {n:,}" for reason, n in self.counts.items() if reason != BYTES)
        return f", {self.count:,} left out ({reasons})" if self.count else ""


def read_items(files: Sequence[Path], kind: str, limit: int = 0, skipped: SkippedItems | None = None) -> list[EvalItem]:
    """Returns at most `limit` items (0: all). skipped.add() counts an invalid record or raises BadInput."""
    skipped = SkippedItems() if skipped is None else skipped
    form = choice_item if kind == "choice" else cloze_item
    items: list[EvalItem] = []
    for path in files:
        for name, value in read_records(path, skipped.damaged, skipped.counts):
            try:
                if not isinstance(value, Mapping):
                    raise BadInput(f"is a {type(value).__name__}, but an item must be an object with fields")
                item = form(name, value)
                answers = len(item.continuations)
                size = answers * len(item.context) + sum(map(len, item.continuations))
                if size > MAX_ITEM_CHARACTERS:
                    raise BadInput(
                        f"has {answers:,} answers with {size:,} characters in total, with each context; the limit "
                        f"is {MAX_ITEM_CHARACTERS:,}; remove the item"
                    )
                items.append(item)
            except BadInput as error:
                skipped.add(BadInput(f"evaluation item {path.parent / name} {error}"))
            if limit and len(items) == limit:
                return items
    if not items:
        raise BadInput(f"no items found in {', '.join(map(str, files))}{skipped}")
    return items


def choice_item(name: str, value: Mapping[str, Any]) -> EvalItem:
    """Returns the item of a record, which has the fields of PIQA, SciQ, ARC or a custom item."""
    if {"context", "choices", "answer"} <= value.keys():
        return context_item(name, value)
    if {"goal", "sol1", "sol2", "label"} <= value.keys():
        answers, right = (text_of(value, "sol1"), text_of(value, "sol2")), right_index(value, "label", 2)
        return question_item(name, f"Question: {text_of(value, 'goal')}\nAnswer:", answers, right)
    if {"question", "correct_answer", "distractor1", "distractor2", "distractor3"} <= value.keys():
        support = text_of(value, "support").lstrip() if value.get("support") is not None else ""
        answers = tuple(text_of(value, f"distractor{i}") for i in (1, 2, 3)) + (text_of(value, "correct_answer"),)
        return question_item(name, f"{support}\nQuestion: {text_of(value, 'question')}\nAnswer:", answers, 3)
    if {"question", "choices", "answerKey"} <= value.keys():
        return arc_item(name, value)
    raise BadInput(
        f"has the fields {listed(value)}, but needs context, choices and answer, or the fields of "
        "PIQA, SciQ or ARC (see docs/evaluate.md)"
    )


def context_item(name: str, value: Mapping[str, Any]) -> EvalItem:
    """Returns the item of {"context", "choices", "answer"}. The context and a choice are joined without a space."""
    choices = texts_of(value, "choices")
    if len(choices) < 2:
        raise BadInput("has fewer than two choices")
    answer = value["answer"]
    if isinstance(answer, str):
        if choices.count(answer) != 1:
            which = "occurs more than once in" if answer in choices else "is not one of"
            raise BadInput(f"has the answer {shown(answer)}, which {which} its choices")
        right = choices.index(answer)
    else:
        right = right_index(value, "answer", len(choices))
    answers = tuple(choice.strip() or choice for choice in choices)
    return EvalItem(name, text_of(value, "context"), choices, answers, right)


def arc_item(name: str, value: Mapping[str, Any]) -> EvalItem:
    """Returns the item of an ARC record, whose answers are labelled with letters or numbers."""
    choices = value["choices"]
    if not isinstance(choices, Mapping) or not {"text", "label"} <= choices.keys():
        raise BadInput("has choices without the fields text and label")
    answers, labels = texts_of(choices, "text"), texts_of(choices, "label")
    if value["answerKey"] not in labels or len(labels) != len(answers):
        raise BadInput(f"has answerKey {shown(value['answerKey'])}, but labels {listed(labels)}; add the missing label")
    right = labels.index(value["answerKey"])
    return question_item(name, f"Question: {text_of(value, 'question')}\nAnswer:", answers, right)


def question_item(name: str, context: str, answers: Sequence[str], right: int) -> EvalItem:
    """Returns an item with a space before each answer. Raises BadInput for an empty answer."""
    if "" in answers:
        raise BadInput("has an empty answer")
    return EvalItem(name, context, tuple(f" {answer}" for answer in answers), tuple(answers), right)


def cloze_item(name: str, value: Mapping[str, Any]) -> EvalItem:
    """Returns the item of {"text"}, as in LAMBADA, or of {"context", "target"}, which are joined without a space."""
    if {"context", "target"} <= value.keys():
        context, target = text_of(value, "context"), text_of(value, "target")
    elif "text" in value:
        context, space, target = text_of(value, "text").rpartition(" ")
        target = space + target
    else:
        raise BadInput(f"has the fields {listed(value)}, but needs text, or context and target")
    if not target.strip():
        raise BadInput("ends in a space, so that no word is left to predict" if "text" in value else "has no target")
    return EvalItem(name, context, (target,), (target.strip(),), 0)


def text_of(value: Mapping[str, Any], field: str) -> str:
    """Returns a text field of the record. Raises BadInput if it is not text."""
    if not isinstance(value[field], str):
        raise BadInput(f"must have text in {field!r}, not {shown(value[field])}")
    return value[field]


def texts_of(value: Mapping[str, Any], field: str) -> tuple[str, ...]:
    """Returns a field that is a list of nonempty texts. Raises BadInput for other values."""
    found = value[field]
    if not isinstance(found, (list, tuple)) or not all(isinstance(text, str) and text for text in found):
        raise BadInput(f"must have a list of nonempty texts in {field!r}, not {shown(found)}")
    return tuple(found)


def right_index(value: Mapping[str, Any], field: str, number: int) -> int:
    """Returns the index of the right answer from a field, which may be an integer or a string of digits."""
    found = value[field]
    digits = isinstance(found, str) and found.isascii() and found.isdecimal() and len(found) < 19
    place = int(found) if digits else found
    if isinstance(place, bool) or not isinstance(place, int) or not 0 <= place < number:
        raise BadInput(f"has {field}={shown(found)}, which is not a zero-based index of its {number} answers")
    return place


def shown(value: Any) -> str:
    """Returns the repr of a value for a message, truncated."""
    return repr(value)[:MAX_SHOWN]


def listed(names: Iterable[Any]) -> str:
    """Returns a comma-separated list of names for a message, truncated."""
    return ", ".join(map(str, names))[:MAX_SHOWN]
