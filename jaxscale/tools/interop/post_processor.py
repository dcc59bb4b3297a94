"""Edits the post-processor of a tokenizer.json, which adds the special tokens at the start of a text."""

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxscale.system.exits import BadInput

PAIRED = {"BertProcessing": 1, "RobertaProcessing": 2}  # number of separators between two texts


def begin_with(begin: Sequence[str], text: str) -> str | None:
    """Edits a tokenizer.json (`text`) to start texts with exactly these tokens. Returns None if it already does."""
    import tokenizers

    tokenizer, spec = tokenizers.Tokenizer.from_str(text), json.loads(text)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    whole = tokenizer.encode("a")
    first = next((place for place, word in enumerate(whole.word_ids) if word is not None), 0)
    ids: list[Any] = list(map(tokenizer.token_to_id, begin))
    if None in ids:
        name = begin[ids.index(None)]
        raise BadInput(f"tokenizer.json has no token {name!r:.80}, which starts documents; use the run's tokenizer")
    if whole.ids[:first] == ids:
        return None
    post_processor = spec.get("post_processor") or {}
    steps = post_processor.get("processors") or [post_processor]
    template = next(filter(None, map(as_template, steps)), template_of([text_of("A")], [text_of("A"), text_of("B")]))
    begin_pieces = [special(name) for name in begin]
    after_begin = lambda pieces: list(itertools.dropwhile(lambda piece: "SpecialToken" in piece, pieces))
    known = template["special_tokens"] | {name: known_as(name, i) for name, i in zip(begin, ids, strict=True)}
    one, two = (begin_pieces + after_begin(template[form]) for form in ("single", "pair"))  # for one text, for a pair
    step = template_of(one, two, known)
    others = [step for step in steps if step.get("type") == "ByteLevel"]  # only changes offsets
    spec["post_processor"] = {"type": "Sequence", "processors": [*others, step]} if others else step
    return tokenizers.Tokenizer.from_str(json.dumps(spec, ensure_ascii=False)).to_str()


def as_template(step: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns a post-processor step as a template, or None if the step adds no token."""
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
    """Returns a TemplateProcessing step of tokenizer.json."""
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": dict(known or {})}


def text_of(name: str) -> dict[str, Any]:
    """Returns a template piece for text A or B."""
    return {"Sequence": {"id": name, "type_id": int(name == "B")}}


def special(name: str) -> dict[str, Any]:
    """Returns a template piece for a special token."""
    return {"SpecialToken": {"id": name, "type_id": 0}}


def known_as(name: str, token: int) -> dict[str, Any]:
    """Returns the entry of a special token in a template."""
    return {"id": name, "ids": [token], "tokens": [name]}
