"""Responses of the prompt file after their rendered prompts: the texts of the line, and the template's text around.

A line is refused where the template changes a text of the response in another way than `_forms` allows.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rlhf_common.chats import Message
from rlhf_coordinator.storage.chat_marks import PROBE
from rlhf_coordinator.storage.chat_template import ChatTemplate
from rlhf_coordinator.storage.prompt_places import Place
from rlhf_coordinator.storage.prompt_warnings import PromptWarnings

_TEXTS: Final = ("reasoning_content", "reasoning", "thinking", "content")
"""Keys of a message whose texts are those of a response."""
_TAG: Final = re.compile(r"\s*(<[^<>\s/|]+>|\[[A-Z_]+\])")
"""An opening tag at the beginning of a text."""
_OPEN: Final = re.compile(r"<([^<>\s/|]+)>\s*$")
"""An opening tag at the end of a prompt."""
_THOUGHT: Final = re.compile("think|thought|reason")
"""Pattern in names of tags that open reasoning."""
_CLOSED: Final = re.compile(r"</(\w*(?:think|thought|reason)\w*)>")
"""A tag that ends reasoning."""
_SHOWN: Final = 80
"""Longest part of a text in an error, and of a prompt's end that is searched for tags, in characters."""


@dataclass(frozen=True, slots=True)
class ResponseText:
    """A response in a line."""

    text: str
    """Contents of the messages of the response, or `written` if they are empty."""
    written: str
    """The text after the prompt, with what the template writes around the texts."""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A prompt that is a chat."""

    place: Place
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...]
    text: str
    """The rendered prompt, with the beginning of the answer."""


@dataclass(frozen=True, slots=True)
class _Text:
    """A text of a message."""

    text: str
    own: bool
    """Whether the assistant says it."""


@dataclass(frozen=True, slots=True)
class _Matched:
    """A rendered chat, split at the texts of its answer."""

    around: list[str]
    """The parts before, between and after the texts."""
    texts: list[str]
    spaces: bool
    """Whether the chat lacks space that `texts` have at their ends."""


@dataclass(frozen=True, slots=True)
class _Response:
    """The text of a response in its chat, split before the first text."""

    before: str
    first: str
    """The first text, unchanged from the line."""
    rest: str
    """The rest: the other texts, unchanged from the line, and the template's text around them."""


class ResponseWriter:
    """Writes responses with one template."""

    def __init__(self, template: ChatTemplate, warnings: PromptWarnings) -> None:
        self._template, self._warnings = template, warnings
        self._usual = PROBE, ""
        """The template's text before and after the last plain response; initially a stand-in."""
        self._begins_unasked: bool | None = None
        """Whether the template begins an answer without add_generation_prompt; None before the first test."""

    def write(self, prompt: ChatPrompt, key: str, said: Sequence[Message]) -> ResponseText:
        """Return the messages of an answer under a key as text. Raises JobError."""
        text = "".join(message["content"] for message in said)
        whole = self._render(prompt, said)
        simple = len(said) == 1 and said[0].keys() <= {"role", "content"} and not _TAG.match(text)
        before, after = self._usual
        if simple and whole == prompt.text + before + text + after:
            parts = _Response(prompt.text + before, text, after)
        else:
            parts = self._parts(prompt, key, said, whole)
            if simple and whole == parts.before + text + parts.rest and parts.before.startswith(prompt.text):
                self._usual = parts.before[len(prompt.text) :], parts.rest
        written = self._text_after_prompt(prompt, key, parts, structured=_first_text(said) != "content")
        return ResponseText(text or written, written)

    def _render(self, prompt: ChatPrompt, said: Sequence[Message]) -> str:
        messages = [*prompt.messages, *said]
        return self._template.render(prompt.place, messages, add_generation_prompt=False, tools=prompt.tools)

    def _parts(self, prompt: ChatPrompt, key: str, said: Sequence[Message], whole: str) -> _Response:
        """Return the chat with the answer, split at its first text. Raises JobError unless it shows every text."""
        shown = _after_common(whole, prompt.text)
        called = [leaf for message in said for call in message.get("tool_calls", ()) for leaf in _said_by(call)]
        if not all(leaf in shown or _quoted(leaf) in shown for leaf in called):
            raise _refused(prompt.place, key, shown)
        texts, tried = _stand_ins(said)
        if not texts and not whole.startswith(prompt.text):
            raise _refused(prompt.place, key, shown)
        if not texts:
            return _Response(prompt.text, "", self._end(prompt, prompt.text, shown))
        skeleton = _split(self._render(prompt, tried), list(texts))
        matched = _matched(whole, [texts[name] for name in skeleton[0]], skeleton[1]) if skeleton else None
        if matched is None:
            raise _refused(prompt.place, key, shown)
        if matched.spaces:
            problem = f"has space at the ends of a text under {key!r} that the chat template would leave out"
            self._warnings.add(prompt.place, problem, "it is trained on; remove it unless it is intended")
        before, *between, after = matched.around
        first, *others = matched.texts
        rest = "".join(piece + text for piece, text in zip(between, others, strict=True))
        return _Response(before, first, rest + self._end(prompt, before, after))

    def _end(self, prompt: ChatPrompt, before: str, after: str) -> str:
        """Return the end of the last turn, without the next answer, which some templates begin without being asked."""
        if self._begins_unasked is None:
            render, messages = self._template.render, list(prompt.messages)
            asked = render(prompt.place, messages, add_generation_prompt=False, tools=prompt.tools)
            self._begins_unasked = asked == prompt.text
        if not self._begins_unasked or before != prompt.text:
            return after
        return _after_common(after[::-1], prompt.text[::-1])[::-1]

    def _text_after_prompt(self, prompt: ChatPrompt, key: str, parts: _Response, *, structured: bool) -> str:
        """Return the text after the rendered prompt.

        `structured`: the template writes reasoning or a call first, and therefore the tags around it.
        """
        if structured:
            if not parts.before.startswith(prompt.text):
                raise _refused(prompt.place, key, parts.before[-_SHOWN:])
            return parts.before[len(prompt.text) :] + parts.first + parts.rest
        extra = parts.before.removeprefix(prompt.text) if parts.before.startswith(prompt.text) else ""
        if extra.strip():
            problem = (
                f"is trained on as it stands under {key!r}, where the chat template would write {extra!r} before it"
            )
            self._warnings.add(
                prompt.place, problem, "write that in the line, or have the template write it in the prompt"
            )
            extra = ""
        return extra + self._first(prompt, key, parts) + parts.rest

    def _first(self, prompt: ChatPrompt, key: str, parts: _Response) -> str:
        """Return the first text without a tag with which the prompt ends.

        Raises JobError for a tag that the template writes before it.
        """
        place, text = prompt.place, parts.first
        tag = _TAG.match(text)
        if tag is not None and prompt.text.rstrip().endswith(tag[1]):
            return _after_common(text[tag.end() :], prompt.text[len(prompt.text.rstrip()) :])
        if tag is not None and tag[1] in _after_common(prompt.text, parts.before):
            raise place.bad(
                f"has a response under {key!r} that begins with {tag[1]}, which the chat template has written and "
                "closed before every answer; remove it from the line, or correct prompts.chatTemplateArguments or "
                "prompts.chatTemplateFile"
            )
        opened = _OPEN.search(prompt.text[-_SHOWN:])
        of_turn = opened is not None and parts.before == prompt.text and not _THOUGHT.search(opened[1])
        if opened is not None and not of_turn and f"</{opened[1]}>" not in text:
            problem = f"has a response under {key!r} without </{opened[1]}>, while the prompt ends in <{opened[1]}>"
            self._warnings.add(
                place, problem, "write the reasoning and its end, or give another prompts.chatTemplateFile"
            )
        closed = _CLOSED.search(text)
        if closed is not None and not _is_open(closed[1], prompt.text[-_SHOWN:] + text[: closed.start()]):
            problem = f"has </{closed[1]}> in a response under {key!r}, with no <{closed[1]}> open before it"
            self._warnings.add(
                place, problem, "write the tag that opens it, or have the template write it in the prompt"
            )
        return text


def _is_open(name: str, text: str) -> bool:
    return text.rfind(f"<{name}>") > text.rfind(f"</{name}>")


def _refused(place: Place, key: str, shown: str) -> Exception:
    text = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
    return place.bad(
        f"has a response under {key!r} that the chat template does not write as it stands: it writes {text!r}, so "
        "the policy would learn other text; give a template for it with prompts.chatTemplateFile, or correct the "
        f"{place.unit}"
    )


def _first_text(said: Sequence[Message]) -> str:
    return next((name for name in _TEXTS if said[0].get(name)), "tool_calls")


def _stand_ins(said: Sequence[Message]) -> tuple[dict[str, _Text], list[Message]]:
    """Return stand-in -> text of the messages, and the messages with stand-ins in place of texts."""
    texts: dict[str, _Text] = {}
    tried = []
    for message in said:
        shown = dict(message)
        for name in _TEXTS:
            if isinstance(text := message.get(name), str) and text:
                shown[name] = f"{PROBE}-{len(texts)}."
                texts[shown[name]] = _Text(text, own=message["role"] == "assistant")
        tried.append(shown)
    return texts, tried


def _split(text: str, names: Sequence[str]) -> tuple[list[str], list[str]] | None:
    """Return the stand-ins in the order of a text, and the parts before, between and after them.

    Return None if one is missing or occurs twice.
    """
    if any(text.count(name) != 1 for name in names):
        return None
    order = sorted(names, key=text.index)
    return order, re.split("|".join(map(re.escape, order)), text)


def _matched(whole: str, texts: Sequence[_Text], between: Sequence[str]) -> _Matched | None:
    """Return a chat split at its texts; None if it does not contain them in a form of `_forms`."""
    at, around, written, spaces = 0, list[str](), list[str](), False
    for text, before in zip(texts, between, strict=False):
        for opening, shown, meant in _forms(text, before):
            if whole.startswith(opening + shown, at):
                at += len(opening + shown)
                around.append(opening)
                written.append(meant)
                spaces |= len(shown) < len(meant)
                break
        else:
            return None
    return _Matched([*around, whole[at:]], written, spaces=spaces) if whole[at:] == between[-1] else None


def _forms(text: _Text, before: str) -> Iterator[tuple[str, str, str]]:
    """Yield (the template's text before a text, the text in its rendering, the intended text), nearest first."""
    openings, tag = [before], _TAG.match(text.text)
    if tag is not None and tag[1] in before:
        openings.append(before[: before.rindex(tag[1])])
    for opening in openings:
        yield opening, text.text, text.text
        yield opening, text.text.strip(), text.text
        if not text.own:
            yield opening, _quoted(text.text), _quoted(text.text)


def _said_by(call: Mapping[str, Any]) -> Iterator[str]:
    """Yield the texts of a tool call: its name, and the names and texts of its arguments."""
    yield str(call["function"]["name"])
    yield from _leaves(call["function"]["arguments"])


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for name, item in value.items():
            yield str(name)
            yield from _leaves(item)
    elif isinstance(value, list):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, str):
        yield value


def _quoted(text: str) -> str:
    """Return a text in the form of a JSON string, without the quotation marks."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _after_common(text: str, other: str) -> str:
    """Return a text without the prefix that it shares with another."""
    if text.startswith(other):
        return text[len(other) :]
    return text[next((at for at, pair in enumerate(zip(text, other, strict=False)) if pair[0] != pair[1]), len(text)) :]
