"""Parses a JSON record of fine-tuning data: a conversation, a prompt with its completion, or plain text."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxscale.system.exits import BadInput
from jaxscale.system.foreign import check_depth, parse_json
from jaxscale.text.config import ChatConfig

ASSISTANT = "assistant"
# ShareGPT's names for who speaks, in the files that circulate.
ROLES = {
    "human": "user", "user": "user", "gpt": ASSISTANT, "chatgpt": ASSISTANT, "bard": ASSISTANT, "bing": ASSISTANT,
    "assistant": ASSISTANT, "model": ASSISTANT, "function_call": ASSISTANT, "system": "system", "tool": "tool",
    "observation": "tool", "function_response": "tool",
}  # fmt: skip
WORD = re.compile(r"[A-Za-z][A-Za-z_-]*")


class Chat(NamedTuple):
    """A conversation. learned: for each message, whether it is the assistant's and to be learned."""

    messages: tuple[Mapping[str, Any], ...]
    learned: tuple[bool, ...]
    tools: Any = None  # as the record has them, for the template


class Pair(NamedTuple):
    """A text that is given, and the one behind it, which is learned; plain text is all completion."""

    prompt: str
    completion: str


def parse_record(record: Any, cfg: ChatConfig, text_field: str) -> Chat | Pair:
    """The conversation, pair or plain text that a record holds.

    Raises BadInput, a message that follows the record's place, for any other record.
    """
    if not isinstance(record, Mapping):
        raise BadInput(f"is {kind(record)}, not an object")
    try:
        check_depth(record)
    except BadInput as error:
        raise BadInput(f"cannot be read: {error}") from None
    if "messages" in record:
        return chat(openai_messages(record["messages"], "messages"), record)
    if "conversations" in record:
        return chat(sharegpt_messages(record), record)
    if cfg.prompt_field in record and cfg.completion_field in record:
        return pair(record, cfg)
    if isinstance(record.get(text_field), str):
        return Pair("", record[text_field])
    has = ", ".join(map(str, record))[:300] or "nothing"
    raise BadInput(
        f"has neither messages nor conversations, nor {cfg.prompt_field} and {cfg.completion_field}, nor "
        f"{text_field}, but {has}; see data.chat"
    )


def chat(messages: Sequence[Mapping[str, Any]], record: Mapping[str, Any], given: int = 0) -> Chat:
    """The conversation of these messages, of which the first `given` are not learned. OpenAI's weight 0 is kept."""
    learned = [
        place >= given and message["role"] == ASSISTANT and message.get("weight", 1) != 0
        for place, message in enumerate(messages)
    ]
    shown = tuple({key: value for key, value in message.items() if key != "weight"} for message in messages)
    return Chat(shown, tuple(learned), listed_tools(record.get("tools")) or None)


def listed_tools(tools: Any) -> Any:
    """The tools of a record; a list that is written as JSON text, as in tables whose tools differ, is read."""
    if not isinstance(tools, str) or not tools:
        return tools
    try:
        found = parse_json(tools)
    except BadInput:
        found = None
    if not isinstance(found, list):
        raise BadInput("has text as tools, which is no list in JSON")
    return found


def pair(record: Mapping[str, Any], cfg: ChatConfig) -> Chat | Pair:
    """Two texts, or two lists of messages, which are one conversation."""
    prompt: Any = record[cfg.prompt_field]
    completion: Any = record[cfg.completion_field]
    if isinstance(prompt, list) and isinstance(completion, list):
        before = openai_messages(prompt, cfg.prompt_field)
        after = openai_messages(completion, cfg.completion_field)
        return chat([*before, *after], record, given=len(before))
    for field, value in ((cfg.prompt_field, prompt), (cfg.completion_field, completion)):
        if not isinstance(value, str):
            raise BadInput(f"has {kind(value)} as {field}, not text")
    return Pair(str(prompt), str(completion))


def openai_messages(found: Any, field: str) -> list[dict[str, Any]]:
    """Messages with role and text, other fields as they are."""
    if not isinstance(found, list):
        raise BadInput(f"has {kind(found)} as {field}, not a list")
    return [openai_message(message, f"{field}[{place}]") for place, message in enumerate(found)]


def openai_message(message: Any, where: str) -> dict[str, Any]:
    """One message: the parts of its content joined, the arguments of its calls as objects."""
    if not isinstance(message, Mapping):
        raise BadInput(f"has {kind(message)} as {where}, not an object")
    role, content, calls = message.get("role"), message.get("content"), message.get("tool_calls")
    if not isinstance(role, str) or not WORD.fullmatch(role):
        raise BadInput(f"has {role!r} as {where}.role, which must be a word such as user")
    role = ASSISTANT if role == "model" else role
    if isinstance(content, list):
        content = "".join(text_part(part, f"{where}.content") for part in content)
    if content is None and calls:
        content = ""
    if not isinstance(content, str):
        raise BadInput(f"has {kind(content)} as {where}.content, not text")
    made = {**message, "role": role, "content": content}
    return made | {"tool_calls": [with_arguments(call, where) for call in calls]} if calls else made


def text_part(part: Any, where: str) -> str:
    """The text of a part of a content."""
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    what = part.get("type") if isinstance(part, Mapping) else kind(part)
    raise BadInput(f"has a part of {what!r} in {where}; only text is read")


def with_arguments(call: Any, where: str) -> Any:
    """A call of a tool, its arguments as the object that templates want, where OpenAI has JSON in a text."""
    if not isinstance(call, Mapping):
        raise BadInput(f"has {kind(call)} in {where}.tool_calls, not an object")
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        return {**call, "function": {**function, "arguments": parse_json(function["arguments"])}}
    except BadInput:
        return call


def sharegpt_messages(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The messages of ShareGPT's form: from and value."""
    found = record["conversations"]
    if not isinstance(found, list):
        raise BadInput(f"has {kind(found)} as conversations, not a list")
    messages = []
    for place, message in enumerate(found):
        where = f"conversations[{place}]"
        if isinstance(message, Mapping) and "role" in message:  # both forms go by this name
            messages.append(openai_message(message, where))
            continue
        if not isinstance(message, Mapping) or not isinstance(message.get("value"), str):
            raise BadInput(f"has no text as {where}.value")
        if message.get("from") not in ROLES:
            raise BadInput(f"has {message.get('from')!r} as {where}.from, which is none of {', '.join(ROLES)}")
        messages.append({"role": ROLES[message["from"]], "content": message["value"]})
    system = record.get("system")
    if isinstance(system, str) and system and not (messages and messages[0]["role"] == "system"):
        messages.insert(0, {"role": "system", "content": system})
    return messages


def kind(value: Any) -> str:
    """Returns JSON's name for the type of a value."""
    names = {dict: "an object", list: "a list", str: "text", bool: "a truth value", type(None): "null"}
    return names.get(type(value), "a number")
