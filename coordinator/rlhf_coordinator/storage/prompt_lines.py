"""The content of the prompt file's records: each prompt and its responses, as text.

A bad record is an error that names its place (exit code 22).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_api.job.rollout import Prompts, PromptSource
from rlhf_coordinator.storage.chat_lines import ChatLines
from rlhf_coordinator.storage.chat_responses import ResponseText
from rlhf_coordinator.storage.chat_template import ChatTemplate
from rlhf_coordinator.storage.prompt_places import Place
from rlhf_coordinator.storage.prompt_records import PromptRecord, read_records
from rlhf_coordinator.storage.prompt_warnings import PromptWarnings


@dataclass(frozen=True, slots=True)
class PromptLine:
    """One record."""

    number: int
    """Number from 1: the line of a JSONL file, the row of a table or of all tables of a folder."""
    place: Place
    text: str
    """The prompt; for a chat, in its template's rendering."""
    record: str
    """JSON object of the record."""
    responses: tuple[ResponseText, ...]
    """Responses, one for each requested key."""


def read_lines(
    prompts: Prompts,
    file: PromptSource,
    whole: Place,
    tokenizer: Any,
    response_keys: Sequence[str],
    warnings: PromptWarnings,
) -> Iterator[PromptLine]:
    """Yield the content of every record of a file; doubtful lines add to `warnings`.

    `whole` is the file's place. Raises JobError naming the first bad record.
    """
    chats = ChatLines(prompts, ChatTemplate(prompts, tokenizer), warnings) if prompts.chat_template else None
    for record in read_records(prompts, file, whole, response_keys):
        yield _line(record, prompts, chats, response_keys)


def _line(record: PromptRecord, prompts: Prompts, chats: ChatLines | None, response_keys: Sequence[str]) -> PromptLine:
    place, key = record.place, prompts.prompt_key
    if chats is None:
        text = _string(place, record.data[key], key)
        responses = [_string(place, _response(record, key), key) for key in response_keys]
        said = tuple(ResponseText(response, response) for response in responses)
        return PromptLine(record.number, place, text, record.text, said)
    chat = chats.prompt(place, record.data)
    answers = tuple(chats.response(chat, key, _response(record, key)) for key in response_keys)
    return PromptLine(record.number, place, chat.text, record.text, answers)


def _response(record: PromptRecord, key: str) -> Any:
    value = record.data[key]
    if value in ("", []):
        message = f"has an empty response under {key!r}; write the response, or remove the {record.place.unit}"
        raise record.place.bad(message)
    return value


def _string(place: Place, value: Any, key: str) -> str:
    if not isinstance(value, str):
        kind = "null" if value is None else f"a {type(value).__name__}"
        raise place.bad(f"has {kind} under {key!r}; it must be a string")
    return value
