"""What the records of the prompt file say: each one's prompt, and the responses that it holds, as text.

Rule: a bad record is an error that names its place and key, and what would be right (exit code 22); nothing is skipped
or cut here. Must never tokenize: lengths are judged where tokens are made (`prompts`, `given_responses`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_api.job.rollout import Message, Prompts, PromptSource
from rlhf_coordinator.storage.chat_template import ChatTemplate
from rlhf_coordinator.storage.prompt_places import Place
from rlhf_coordinator.storage.prompt_records import PromptRecord, read_records
from rlhf_coordinator.storage.prompt_warnings import PromptWarnings


@dataclass(frozen=True, slots=True)
class ResponseText:
    """A response that a line holds."""

    text: str
    """What the model is to say."""
    written: str
    """What follows the prompt's text as the policy reads it: a chat template may end the turn in its own way."""


@dataclass(frozen=True, slots=True)
class PromptLine:
    """One record."""

    number: int
    """From 1: the line of a JSONL file, the row of a table."""
    place: Place
    text: str
    """The prompt; of a chat, as its template renders it."""
    record: str
    """The JSON object."""
    responses: tuple[ResponseText, ...]
    """One for each key that was asked for."""


def read_lines(
    prompts: Prompts,
    file: PromptSource,
    whole: Place,
    tokenizer: Any,
    response_keys: Sequence[str],
    warnings: PromptWarnings,
) -> Iterator[PromptLine]:
    """Yield what every record of a file says, whose place is `whole`; lines that are doubtful go to `warnings`. Raises
    JobError naming the first bad one."""
    template = ChatTemplate(prompts, tokenizer) if prompts.chat_template else None
    for record in read_records(prompts, file, whole, response_keys):
        yield _line(record, prompts, template, response_keys)


def _line(
    record: PromptRecord, prompts: Prompts, template: ChatTemplate | None, response_keys: Sequence[str]
) -> PromptLine:
    place, key = record.place, prompts.prompt_key
    prompt = record.data[key]
    if template is None:
        text = _string(place, prompt, key)
        responses = [_string(place, _response(record, key), key) for key in response_keys]
        said = tuple(ResponseText(response, response) for response in responses)
        return PromptLine(record.number, place, text, record.text, said)
    messages = prompts.conversation(prompt if isinstance(prompt, str) else _messages(place, prompt, key))
    text = template.render(place, messages, add_generation_prompt=True)
    chats = tuple(_chat_response(record, key, messages, text, template) for key in response_keys)
    return PromptLine(record.number, place, text, record.text, chats)


def _response(record: PromptRecord, key: str) -> Any:
    value = record.data[key]
    if value in ("", []):
        message = f"has an empty response under {key!r}; write what is to be said, or drop the {record.place.unit}"
        raise record.place.bad(message)
    return value


def _string(place: Place, value: Any, key: str) -> str:
    if not isinstance(value, str):
        kind = "null" if value is None else f"a {type(value).__name__}"
        raise place.bad(f"has {kind} under {key!r}; it must be a string")
    return value


def _messages(place: Place, value: Any, key: str) -> list[Message]:
    if not isinstance(value, list) or not all(_is_message(message) for message in value):
        message = f"needs a string or a list of {{role, content}} messages under {key!r} (prompts.chatTemplate)"
        raise place.bad(message)
    return value


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(part), str) for part in ("role", "content"))


def _chat_response(
    record: PromptRecord, key: str, prompt: list[Message], rendered: str, template: ChatTemplate
) -> ResponseText:
    """What the template adds to the prompt for the response. A template whose prompt for an answer is no beginning of
    the answered chat, as some that think first have it, says nothing of that: then it is the message alone."""
    place, value = record.place, _response(record, key)
    said = [{"role": "assistant", "content": value}] if isinstance(value, str) else _messages(place, value, key)
    whole = template.render(place, [*prompt, *said], add_generation_prompt=False)
    text = "".join(message["content"] for message in said)
    if whole.startswith(rendered) and len(whole) > len(rendered):
        return ResponseText(text, whole[len(rendered) :])
    if len(said) > 1:
        message = f"has {len(said)} messages under {key!r}, which the chat template does not write after its prompt"
        raise place.bad(f"{message} for an answer: give one message, or a string")
    return ResponseText(text, text)
