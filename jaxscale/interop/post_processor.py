"""The post-processor of a tokenizer.json: which special tokens begin a text."""

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxscale.system.exits import BadInput

PAIRED = {"BertProcessing": 1, "RobertaProcessing": 2}  # how often the separator stands between two texts


def begin_with(begin: Sequence[str], text: str) -> str | None:
    """A tokenizer.json that puts these tokens before a text in place of those that it has put there; None: it does.

    What it puts behind a text stays, and what stands between the two of a pair.
    """
    import tokenizers

    made, spec = tokenizers.Tokenizer.from_str(text), json.loads(text)
    made.no_truncation()
    made.no_padding()
    whole = made.encode("a")
    first = next((place for place, word in enumerate(whole.word_ids) if word is not None), 0)
    ids = [known_id(made, name) for name in begin]
    if whole.ids[:first] == ids:
        return None
    old = spec.get("post_processor") or {}
    steps = old.get("processors") or [old]
    template = next(filter(None, map(as_template, steps)), template_of([text_of("A")], [text_of("A"), text_of("B")]))
    put = [special(name) for name in begin]
    behind = [list(itertools.dropwhile(lambda piece: "SpecialToken" in piece, template[key])) for key in FORMS]
    known = template["special_tokens"] | {name: known_as(name, i) for name, i in zip(begin, ids, strict=True)}
    step = template_of(put + behind[0], put + behind[1], known)
    others = [step for step in steps if step.get("type") == "ByteLevel"]  # it moves offsets alone
    spec["post_processor"] = {"type": "Sequence", "processors": [*others, step]} if others else step
    return tokenizers.Tokenizer.from_str(json.dumps(spec, ensure_ascii=False)).to_str()


def known_id(made: Any, name: str) -> int:
    """Returns the id of a token by name. Raises BadInput if the tokenizer does not have it."""
    if (found := made.token_to_id(name)) is None:
        raise BadInput(f"tokenizer.json has no token {name!r:.80}, with which the documents of the run begin")
    return found


FORMS = ("single", "pair")  # of a template: for one text, and for two


def as_template(step: Mapping[str, Any]) -> dict[str, Any] | None:
    """A step of a post-processor as a template; None for one that adds no token."""
    kind = step.get("type")
    if kind == "TemplateProcessing":
        pair = step.get("pair") or [text_of("A"), text_of("B")]
        return template_of(step["single"], pair, dict(step.get("special_tokens") or {}))
    if kind not in PAIRED:
        return None
    (first, first_id), (last, last_id) = step["cls"], step["sep"]
    begin, end, between = [special(first)], [special(last)], [special(last)] * PAIRED[kind]
    known = {first: known_as(first, first_id), last: known_as(last, last_id)}
    one, two = text_of("A"), text_of("B")
    return template_of([*begin, one, *end], [*begin, one, *between, two, *end], known)


def template_of(single: Sequence, pair: Sequence, known: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A TemplateProcessing as tokenizer.json has it."""
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": dict(known or {})}


def text_of(name: str) -> dict[str, Any]:
    """The place of a text, A or B."""
    return {"Sequence": {"id": name, "type_id": int(name == "B")}}


def special(name: str) -> dict[str, Any]:
    """The place of a special token."""
    return {"SpecialToken": {"id": name, "type_id": 0}}


def known_as(name: str, token: int) -> dict[str, Any]:
    """Returns the entry of a special token in a template."""
    return {"id": name, "ids": [token], "tokens": [name]}
