"""A cache of tokenized prompts in the journal's folder, for a restarted coordinator."""

from collections.abc import Sequence
from pathlib import Path

from rlhf_coordinator.failures import storage_error
from rlhf_coordinator.storage.given_responses import GivenResponse
from rlhf_coordinator.storage.journal import Journal, frame, unframe, write_atomically
from rlhf_coordinator.storage.journal_pb2 import Record, TokenizedPrompt, TokenizedResponse
from rlhf_coordinator.storage.prompts import Prompt


def _path(journal: Journal, digest: str) -> Path:
    return journal.folder / f"prompts-{digest[:16]}.log"


def tokenized_before(journal: Journal, digest: str) -> list[Prompt] | None:
    """Return the stored tokenized prompts; None when they are absent, unreadable or damaged."""
    try:
        data = _path(journal, digest).read_bytes()
    except OSError:
        return None
    prompts, end = [], 0
    for record, offset in unframe(data):
        item, end = record.prompt, offset
        responses = tuple(GivenResponse(response.tokens, response.text) for response in item.responses)
        read = (item.line, item.tokens, item.text, item.record, responses, item.filtered, item.source)
        prompts.append(Prompt(*read, tuple(item.warnings)))
    return prompts if prompts and end == len(data) else None


def keep_tokenized(journal: Journal, digest: str, prompts: Sequence[Prompt]) -> None:
    """Store the tokenized prompts. Raises JobError (exit code 23)."""
    records = (Record(prompt=_message(item)) for item in prompts)
    path = _path(journal, digest)
    try:
        write_atomically(path, b"".join(map(frame, records)))
    except OSError as error:
        raise storage_error("the journal", path, error, "RLHF_RUN_DIR") from error


def _message(item: Prompt) -> TokenizedPrompt:
    return TokenizedPrompt(
        line=item.line,
        tokens=item.tokens,
        text=item.text,
        record=item.record,
        responses=[TokenizedResponse(tokens=response.tokens, text=response.text) for response in item.responses],
        filtered=item.filtered,
        source=item.source,
        warnings=item.warnings,
    )
