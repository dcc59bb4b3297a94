"""Parses JSON records of fine-tuning data as conversations, prompt-completion pairs, or plain text."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxscale.runtime.text.config import ChatConfig
from jaxscale.system.exits import BadInput
from jaxscale.system.foreign import check_depth, parse_json

ASSISTANT = "assistant"
# Roles in ShareGPT files.
ROLES = {
    "human": "user", "user": "user", "gpt": ASSISTANT, "chatgpt": ASSISTANT, "bard": ASSISTANT, "bing": ASSISTANT,
    "assistant": ASSISTANT, "model": ASSISTANT, "function_call": ASSISTANT, "system": "system", "tool": "tool",
    "observation": "tool", "function_response": "tool",
}  # fmt: skip
WORD = re.compile(r"[A-Za-z][A-Za-z_-]*")


class Conversation(NamedTuple):
    """The messages of a conversation. in_loss: for each message, True if it has a loss (assistant messages only)."""

    messages: tuple[Mapping[str, Any], ...]
    in_loss: tuple[bool, ...]
    tools: Any = None  # passed to the template unchanged


class PromptCompletion(NamedTuple):
    """A prompt without loss, and a completion with loss. Plain text is a completion with an empty prompt."""

    prompt: str
    completion: str


def parse_record(record: Any, cfg: ChatConfig, text_field: str) -> Conversation | PromptCompletion:
    """Parses a record. Raises BadInput with a message that callers append to the location of the record."""
    if not isinstance(record, Mapping):
        raise BadInput(f"is of type {json_type(record)}; it must be an object")
    try:
        check_depth(record)
    except BadInput as error:
        raise BadInput(f"cannot be read: {error}") from None
    if "messages" in record:
        return make_conversation(openai_messages(record["messages"], "messages"), record)
    if "conversations" in record:
        return make_conversation(sharegpt_messages(record), record)
    if cfg.prompt_field in record and cfg.completion_field in record:
        return parse_pair(record, cfg)
    if isinstance(record.get(text_field), str):
        return PromptCompletion("", record[text_field])
    has = ", ".join(map(str, record))[:300] or "none"
    raise BadInput(
        f"must have the field messages, conversations or {text_field}, or both {cfg.prompt_field} and "
        f"{cfg.completion_field}; its fields are {has}; set the field names in data.chat"
    )


def make_conversation(
    messages: Sequence[Mapping[str, Any]], record: Mapping[str, Any], num_prompt: int = 0
) -> Conversation:
    """Makes a conversation. The first `num_prompt` messages and messages with OpenAI's weight 0 have no loss."""
    in_loss = [
        index >= num_prompt and message["role"] == ASSISTANT and message.get("weight", 1) != 0
        for index, message in enumerate(messages)
    ]
    unweighted = tuple({key: value for key, value in message.items() if key != "weight"} for message in messages)
    return Conversation(unweighted, tuple(in_loss), parse_tools(record.get("tools")) or None)


def parse_tools(tools: Any) -> Any:
    """Returns the tools of a record. Parses a JSON string, in which tables store tools with different fields."""
    if not isinstance(tools, str) or not tools:
        return tools
    try:
        found = parse_json(tools)
    except BadInput:
        found = None
    if not isinstance(found, list):
        raise BadInput("has tools as text that is not a JSON list; write a JSON list")
    return found


def parse_pair(record: Mapping[str, Any], cfg: ChatConfig) -> Conversation | PromptCompletion:
    """Parses a prompt and a completion: either two texts, or two lists of messages of one conversation."""
    prompt: Any = record[cfg.prompt_field]
    completion: Any = record[cfg.completion_field]
    if isinstance(prompt, list) and isinstance(completion, list):
        before = openai_messages(prompt, cfg.prompt_field)
        after = openai_messages(completion, cfg.completion_field)
        return make_conversation([*before, *after], record, num_prompt=len(before))
    for field, value in ((cfg.prompt_field, prompt), (cfg.completion_field, completion)):
        if not isinstance(value, str):
            raise BadInput(f"has {field} of type {json_type(value)}; it must be text")
    return PromptCompletion(str(prompt), str(completion))


def openai_messages(found: Any, field: str) -> list[dict[str, Any]]:
    """Parses a list of messages in OpenAI's format (role, content). Other fields are unchanged."""
    if not isinstance(found, list):
        raise BadInput(f"has {field} of type {json_type(found)}; it must be a list")
    return [openai_message(message, f"{field}[{index}]") for index, message in enumerate(found)]


def openai_message(message: Any, where: str) -> dict[str, Any]:
    """Parses a message in OpenAI's format: joins the parts of the content, and parses arguments of tool calls."""
    if not isinstance(message, Mapping):
        raise BadInput(f"has {where} of type {json_type(message)}; it must be an object")
    role, content, calls = message.get("role"), message.get("content"), message.get("tool_calls")
    if not isinstance(role, str) or not WORD.fullmatch(role):
        raise BadInput(f"has {where}.role={role!r}; it must be a name such as user")
    role = ASSISTANT if role == "model" else role
    if isinstance(content, list):
        parts = [part if isinstance(part, Mapping) else {"type": json_type(part)} for part in content]
        for part in parts:
            if part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise BadInput(f"has a part of type {part.get('type')!r} in {where}.content; only text is supported")
        content = "".join(part["text"] for part in parts)
    if content is None and calls:
        content = ""
    if not isinstance(content, str):
        raise BadInput(f"has {where}.content of type {json_type(content)}; it must be text")
    parsed = {**message, "role": role, "content": content}
    return parsed | {"tool_calls": [parse_arguments(call, where) for call in calls]} if calls else parsed


def parse_arguments(call: Any, where: str) -> Any:
    """Returns a tool call with parsed arguments, which are JSON text in OpenAI's format. Templates expect an object."""
    if not isinstance(call, Mapping):
        raise BadInput(f"has an item of type {json_type(call)} in {where}.tool_calls; it must be an object")
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        return {**call, "function": {**function, "arguments": parse_json(function["arguments"])}}
    except BadInput:
        return call


def sharegpt_messages(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Parses messages in ShareGPT's format (from, value)."""
    found = record["conversations"]
    if not isinstance(found, list):
        raise BadInput(f"has conversations of type {json_type(found)}; it must be a list")
    messages = []
    for index, message in enumerate(found):
        where = f"conversations[{index}]"
        if isinstance(message, Mapping) and "role" in message:  # OpenAI's format in the field `conversations`
            messages.append(openai_message(message, where))
            continue
        if not isinstance(message, Mapping) or not isinstance(message.get("value"), str):
            raise BadInput(f"has no text in {where}.value")
        if message.get("from") not in ROLES:
            raise BadInput(f"has {where}.from={message.get('from')!r}; it must be one of {', '.join(ROLES)}")
        messages.append({"role": ROLES[message["from"]], "content": message["value"]})
    system = record.get("system")
    if isinstance(system, str) and system and not (messages and messages[0]["role"] == "system"):
        messages.insert(0, {"role": "system", "content": system})
    return messages


def json_type(value: Any) -> str:
    """Returns the name of a value's JSON type, for messages."""
    names = {dict: "object", list: "list", str: "text", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")
