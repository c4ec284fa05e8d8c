"""Chats in prompt files: the messages and tools that a record may have, in the form that templates read.

Rule: pure.
"""

from collections.abc import Mapping
from typing import Any, Final

from rlhf_common.json_document import parse_json
from rlhf_common.nesting import MAX_DEPTH, too_deep

Message = dict[str, Any]
"""A message of a chat: role, content, and other keys for templates."""
TOOLS: Final = "tools"
"""Key of a record with the tools of its prompt: a list of JSON schemas or its JSON text."""
OF_SYSTEM: Final = ("system", "developer")
"""Roles whose messages instruct the policy without a question."""
FORM: Final = "needs a string or a list of {role, content} messages"


class ChatError(ValueError):
    """A record's chat is rejected; the message continues the record's location."""


def messages_of(value: object, key: str) -> list[Message]:
    """Return the messages under a key of a record. Raises ChatError."""
    if not isinstance(value, list):
        raise ChatError(f"{FORM} under {key!r} (prompts.chatTemplate)")
    if not value:
        raise ChatError(f"has an empty list of messages under {key!r}; write one at least")
    return [_message(message, f"message {number} under {key!r}") for number, message in enumerate(value, 1)]


def tools_of(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the tools of a record; an empty list without any. Raises ChatError."""
    tools = record.get(TOOLS)
    if isinstance(tools, str) and tools.strip():
        try:
            tools = _parsed(tools)
        except ValueError as error:
            raise ChatError(f"has tools that are no JSON ({error}); {_TOOLS_FORM}") from error
    if not tools:
        return []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) and tool for tool in tools):
        raise ChatError(f"has tools that are no list of objects; {_TOOLS_FORM}")
    return [_without_nulls(tool) for tool in tools]


_NULLABLE: Final = frozenset({"default", "const"})
"""Keywords of a JSON schema that accept null as a value."""
_TOOLS_FORM: Final = (
    "write a list of JSON schemas, such as [{type: function, function: {name, parameters}}], or leave the column "
    "out with prompts.columns"
)


def _message(value: object, name: str) -> Message:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str) or not value["role"]:
        raise ChatError(f"{FORM}: {name} has no role")
    # Rows of a table have every key, with null for the keys that a message lacks.
    message = {key: item for key, item in value.items() if item is not None}
    if message.get("tool_calls"):
        if message["role"] != "assistant":
            raise ChatError(
                f"has tool_calls in {name}, whose role is {message['role']}; only the assistant calls tools"
            )
        message["tool_calls"] = _calls(message["tool_calls"], name)
        message.setdefault("content", "")
    else:
        message.pop("tool_calls", None)
    if not isinstance(message.get("content"), str):
        kind = f"a {type(message['content']).__name__}" if "content" in message else "null"
        raise ChatError(f"{FORM}: the content of {name} is {kind}, and must be a string")
    return message


def _calls(calls: object, name: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise ChatError(f"has tool_calls in {name} that are no list; {_CALL_FORM}")
    return [_call(call, name) for call in calls]


_CALL_FORM: Final = "write [{type: function, function: {name, arguments}}]"


def _call(call: object, name: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ChatError(f"has a tool call without a name in {name}; {_CALL_FORM}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        # Templates write arguments as JSON, so JSON text would be quoted twice.
        try:
            arguments = _parsed(arguments or "{}")
        except ValueError as error:
            raise ChatError(f"has arguments of {function['name']} in {name} that are no JSON: {error}") from error
    if not isinstance(arguments, dict | None):
        raise ChatError(f"has arguments of {function['name']} in {name} that are no object; {_CALL_FORM}")
    function = {**function, "arguments": arguments or {}}
    assert isinstance(call, dict)
    others = {key: item for key, item in call.items() if item is not None} if "function" in call else {}
    return {"type": "function", **others, "function": function}


def _parsed(text: str) -> Any:
    """Return the JSON document in a string of a record. Raises ValueError, also for one that is nested too deep."""
    value = parse_json(text)
    if too_deep(value) is not None:
        raise ValueError(f"it has more than {MAX_DEPTH} levels")
    return value


def _without_nulls(value: Any) -> Any:
    """Return a schema without members that are null, except those of `_NULLABLE`."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None or key in _NULLABLE}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
