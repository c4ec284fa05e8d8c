"""Chats of the prompt file as text: the prompt with the beginning of the answer.

A line is refused where the template leaves out a part of its prompt; possibly intended deviations cause a warning.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from rlhf_api.job.rollout import Prompts
from rlhf_common.chats import OF_SYSTEM, TOOLS, ChatError, Message, messages_of, tools_of
from rlhf_coordinator.failures import JobError
from rlhf_coordinator.storage.chat_marks import PROBE, ChatMarks
from rlhf_coordinator.storage.chat_responses import ChatPrompt, ResponseText, ResponseWriter
from rlhf_coordinator.storage.chat_template import ChatTemplate
from rlhf_coordinator.storage.prompt_places import Place
from rlhf_coordinator.storage.prompt_warnings import PromptWarnings

OF_TURN: Final = ("tool_calls", "reasoning_content", "reasoning", "thinking")
"""Keys of a message that are part of its content."""
_ROLES: Final = (*OF_SYSTEM, "user", "assistant", "tool")
_ASSISTANTS: Final = ("assistant", "model", "gpt", "chatgpt", "bot", "chatbot", "ai")
"""Names, in any case, that data sets use for the assistant."""
_REASONING: Final = ("reasoning_content", "reasoning", "thinking")
"""Keys of a message that count as synonyms for its reasoning."""


class ChatLines:
    """Renders chats with one template."""

    def __init__(self, prompts: Prompts, template: ChatTemplate, warnings: PromptWarnings) -> None:
        self._prompts, self._template, self._warnings = prompts, template, warnings
        self._marks = ChatMarks(template)
        self._hidden_in: dict[tuple[object, ...], frozenset[int]] = {}
        """Shape of a chat (roles and keys of its messages, whether it has tools) -> numbers of the messages that the
        template leaves out."""
        self._responses = ResponseWriter(template, warnings)
        self._remedy = f"give a template with {prompts.field}.chatTemplateFile"

    def prompt(self, place: Place, record: Mapping[str, Any]) -> ChatPrompt:
        """Return the rendered prompt of a record. Raises JobError."""
        key = self._prompts.prompt_key
        try:
            messages, tools = self._prompts.conversation(record[key]), tools_of(record)
        except ChatError as error:
            raise place.bad(str(error)) from error
        self._check_turns(place, key, messages)
        self._check_keys(place, messages)
        self._warn_of_roles(place, key, messages)
        self._warn_of_marks(place, key, messages)
        if unwritten := self._marks.unwritten:
            problem = f"is rendered without {unwritten!r}, which the chat template writes before every answer"
            self._warnings.add(place, problem, f"{self._remedy} that reads add_generation_prompt")
        text = self._template.render(place, messages, add_generation_prompt=True, tools=tools)
        if tools:
            self._check_tools(place, messages, tools, text)
        self._check_written(ChatPrompt(place, tuple(messages), tuple(tools), text), key)
        return ChatPrompt(place, tuple(messages), tuple(tools), text)

    def response(self, prompt: ChatPrompt, key: str, value: object) -> ResponseText:
        """Return the answer to a prompt in a record's value. Raises JobError."""
        place = prompt.place
        try:
            said = [{"role": "assistant", "content": value}] if isinstance(value, str) else messages_of(value, key)
        except ChatError as error:
            raise place.bad(str(error)) from error
        if said[0]["role"] != "assistant" or said[-1]["role"] != "assistant":
            end = "begin" if said[0]["role"] != "assistant" else "end"
            raise place.bad(f"has a response under {key!r} that does not {end} with a message of the assistant")
        self._check_keys(place, said)
        self._warn_of_roles(place, key, said)
        self._warn_of_marks(place, key, said)
        return self._responses.write(prompt, key, said)

    def _check_turns(self, place: Place, key: str, messages: Sequence[Message]) -> None:
        """Refuse a chat that ends with the assistant's message; warn about one with only system messages."""
        if messages[-1]["role"].casefold() in _ASSISTANTS:
            raise place.bad(
                f"ends with a message of the assistant under {key!r}, which the policy would answer, not "
                "continue; remove it, or let a message of the user follow"
            )
        if all(message["role"] in OF_SYSTEM for message in messages):
            problem = f"has no message of the user under {key!r}"
            self._warnings.add(place, problem, "add the user's message, unless the policy starts the dialogue")

    def _check_keys(self, place: Place, messages: Sequence[Message]) -> None:
        for message in messages:
            for name in message.keys() - {"role", "content"}:
                names = _REASONING if name in _REASONING else (name,)
                if name == "tool_calls":
                    self._warn_of_nulls(place, message[name])
                if not message[name] or any(map(self._template.reads_key, names)):
                    continue
                problem = f"has {name} in a message, which the chat template does not read"
                if name in OF_TURN:
                    raise place.bad(f"{problem}; {self._remedy} that does, or write it into the content")
                self._warnings.add(place, problem, "the model does not see it")

    def _check_tools(
        self, place: Place, messages: list[Message], tools: Sequence[Mapping[str, Any]], text: str
    ) -> None:
        """Refuse tools that the template leaves out; warn where it leaves out a part of one."""
        if not self._template.reads(TOOLS) or text == self._template.render(
            place, messages, add_generation_prompt=True
        ):
            message = f"has {TOOLS}, which the chat template does not write; {self._remedy} that does"
            raise place.bad(f"{message}, or leave the column out with {self._prompts.field}.columns")
        for tool in tools:
            function = tool.get("function", tool)
            name, *more = _texts_of(function if isinstance(function, dict) else tool)
            if not _is_in(name, text):
                raise place.bad(
                    f"has the tool {name!r}, which the chat template does not write; {self._remedy} that does"
                )
            if lost := next((part for part in more if not _is_in(part, text)), None):
                problem = f"has {lost!r} in a tool, which the chat template does not write"
                self._warnings.add(place, problem, f"check that this is intended, or {self._remedy}")

    def _check_written(self, prompt: ChatPrompt, key: str) -> None:
        """Refuse a prompt if the template leaves out or changes a message.

        Other spaces, a message of the assistant, and a system message that has an effect cause a warning instead.
        """
        place, text = prompt.place, prompt.text
        hidden = self._hidden(prompt)
        for number, message in enumerate(prompt.messages):
            content, role = message["content"], message["role"]
            if not (content.strip() or message.keys() - {"role", "content", "name"}):
                problem = f"has an empty message of role {role} under {key!r}"
                self._warnings.add(place, problem, "write the intended text, or remove it")
                continue
            if number not in hidden and _is_in(content, text) and all(_is_in(name, text) for name in _called(message)):
                if not _is_in(content, text, spaces=True):
                    problem = f"has spaces or line breaks under {key!r} that the chat template changes"
                    self._warnings.add(
                        place, problem, f"check that this is intended, or {self._remedy} that keeps them"
                    )
                continue
            problem = f"has a message of role {role} under {key!r} that the chat template does not write as it stands"
            if role != "assistant" and not (role in OF_SYSTEM and self._counts(prompt, message)):
                raise place.bad(f"{problem}; {self._remedy} that does, or correct the message")
            self._warnings.add(
                place, problem, f"check that this is intended, as where reasoning is left out, or {self._remedy}"
            )

    def _hidden(self, prompt: ChatPrompt) -> frozenset[int]:
        """Return the numbers of the messages that the template leaves out, tested with a stand-in for each text."""
        shape = (*((message["role"], *sorted(message)) for message in prompt.messages), bool(prompt.tools))
        if shape not in self._hidden_in:
            names = [f"{PROBE}-{number}." for number in range(len(prompt.messages))]
            tried = [message | {"content": name} for message, name in zip(prompt.messages, names, strict=True)]
            try:
                text = self._template.render(prompt.place, tried, add_generation_prompt=True, tools=prompt.tools)
            except JobError:
                text = "".join(names)
            self._hidden_in[shape] = frozenset(number for number, name in enumerate(names) if name not in text)
        return self._hidden_in[shape]

    def _counts(self, prompt: ChatPrompt, message: Message) -> bool:
        """Return whether the prompt would differ without a message."""
        others = [other for other in prompt.messages if other is not message]
        without = self._template.render(prompt.place, others, add_generation_prompt=True, tools=prompt.tools)
        return without != prompt.text

    def _warn_of_roles(self, place: Place, key: str, messages: Sequence[Message]) -> None:
        for role in {message["role"]: None for message in messages}:
            if role in _ROLES or (role.casefold() not in (*_ROLES, *_ASSISTANTS) and self._template.reads(role)):
                continue
            problem = f"has a message of role {role!r} under {key!r}, which is not one of {', '.join(_ROLES)}"
            self._warnings.add(place, problem, "write one of them, unless the model was trained with that role")

    def _warn_of_nulls(self, place: Place, calls: Sequence[Mapping[str, Any]]) -> None:
        """Warn about nulls in the arguments of tool calls in a table."""
        for call in calls if place.unit == "row" else ():
            if None in call["function"]["arguments"].values():
                problem = f"has null in arguments of {call['function']['name']}, and the policy reads it"
                self._warnings.add(place, problem, "write arguments as JSON text, unless null is intended")

    def _warn_of_marks(self, place: Place, key: str, messages: Sequence[Message]) -> None:
        for message in messages:
            if message["content"].lstrip().startswith("[{") and '"role"' in message["content"]:
                problem = f"holds the JSON text of messages under {key!r}, which is read as one message of the user"
                self._warnings.add(place, problem, "write the list of messages itself, unless the text is intended")
            if mark := self._marks.first_in(message["content"]):
                problem = f"holds {mark}, a mark of the chat template, under {key!r}"
                remedy = (
                    f"write the text alone, or set {self._prompts.field}.chatTemplate to false for rendered prompts"
                )
                self._warnings.add(place, problem, remedy)


def _called(message: Message) -> list[str]:
    return [str(call["function"]["name"]) for call in message.get("tool_calls", ())]


def _texts_of(function: Mapping[str, Any]) -> Iterator[str]:
    """Yield the texts of a tool's description: its name, its description, and the names of its parameters."""
    yield str(function.get("name", ""))
    if isinstance(description := function.get("description"), str):
        yield description
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    yield from map(str, properties if isinstance(properties, dict) else ())


def _is_in(content: str, text: str, *, spaces: bool = False) -> bool:
    """Return whether a text contains a content, literally or as a JSON string, ignoring space around it.

    `spaces`: whether the space within it must be equal.
    """
    content = content.strip()
    quoted = (json.dumps(content, ensure_ascii=escaped)[1:-1] for escaped in (False, True))
    if content in text or any(form in text for form in quoted):
        return True
    return not spaces and _words(content) in _words(text)


def _words(text: str) -> str:
    return re.sub(r"\s+", " ", text)
