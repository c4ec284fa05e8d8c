"""Prompts from their files: records become tokens, and those that are too long are refused or left out.

Rule: a bad record is an error with its place before anything starts (exit code 22); nothing is cut, and nothing is left
out but what spec.prompts.overlong says, counted. A source of which nothing is left is an error, too.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from rlhf_api.job.rollout import Prompts
from rlhf_api.surrogates import has_half_pair
from rlhf_coordinator.storage.given_responses import GivenResponse, text_ids, tokenized_responses
from rlhf_coordinator.storage.prompt_lines import PromptLine, read_lines
from rlhf_coordinator.storage.prompt_places import Place
from rlhf_coordinator.storage.prompt_records import places
from rlhf_coordinator.storage.prompt_warnings import PromptWarnings
from rlhf_coordinator.storage.prompts import Prompt

_CHUNK: Final = 1024
"""Prompts tokenized at once: enough for the tokenizer's own threads, little memory."""
_FILTER: Final = "leave such lines out with spec.prompts.overlong: Filter"


def read_prompts(
    prompts: Prompts,
    tokenizer: Any,
    max_tokens: int,
    response_keys: Sequence[str] = (),
    max_response_tokens: int = 0,
) -> list[Prompt]:
    """Return the records of the files, tokenized, with the responses under `response_keys`.

    Raises JobError (exit code 22) naming the first bad one; `prompts.overlong` says whether one that is too long is bad
    or left out.
    """
    result: list[Prompt] = []
    warnings = PromptWarnings()
    for source, (file, whole) in enumerate(places(prompts)):
        lines = list(read_lines(prompts, file, whole, tokenizer, response_keys, warnings))
        if not lines:
            raise whole.bad("has no prompts; it needs at least one line with a JSON object, or one row")
        before = result[-1].line if result else 0
        kept = _SourcePrompts(prompts, source, before, max_tokens, response_keys, max_response_tokens, warnings)
        for start in range(0, len(lines), _CHUNK):
            kept.add(lines[start : start + _CHUNK], tokenizer)
        result += kept.all(whole)
    return [replace(result[0], warnings=warnings.sentences()), *result[1:]]


class _SourcePrompts:
    """Prompts of a source that are not left out."""

    def __init__(
        self,
        prompts: Prompts,
        source: int,
        before: int,
        max_tokens: int,
        keys: Sequence[str],
        max_response: int,
        warnings: PromptWarnings,
    ) -> None:
        self._prompts, self._source, self._before = prompts, source, before
        self._max_tokens, self._keys, self._max_response = max_tokens, keys, max_response
        self._warnings = warnings
        self._result: list[Prompt] = []
        self._filtered = 0

    def add(self, lines: Sequence[PromptLine], tokenizer: Any) -> None:
        """Tokenize some records. Raises JobError."""
        for line in lines:
            if any(map(has_half_pair, (line.text, *(response.written for response in line.responses)))):
                raise line.place.bad("is rendered by the chat template with half a surrogate pair, which is no text")
        special = not self._prompts.chat_template  # a chat template writes the special tokens itself
        encoded = text_ids(tokenizer, [line.text for line in lines], special=special)
        given: list[tuple[GivenResponse, ...]] = [()] * len(lines)
        if self._keys:
            given = tokenized_responses(lines, encoded, tokenizer, special=special)
        for line, ids, responses in zip(lines, encoded, given, strict=True):
            if not ids:
                raise line.place.bad("is an empty prompt: it has no tokens, so there is nothing to continue")
            if self._is_left_out(line, ids, responses):
                self._filtered += 1
                continue
            tokens = np.array(ids, dtype="<i4").tobytes()
            number = self._before + line.number
            self._result.append(Prompt(number, tokens, line.text, line.record, responses, self._filtered, self._source))
            self._filtered = 0

    def all(self, whole: Place) -> list[Prompt]:
        """Return the prompts. Raises JobError when there are none."""
        if not self._result:
            what = f"has no line that is short enough: all {self._filtered} are longer than spec.rollout allows"
            raise whole.bad(what)
        last = self._result[-1]
        self._result[-1] = replace(last, filtered=last.filtered + self._filtered)
        return self._result

    def _is_left_out(self, line: PromptLine, ids: list[int], responses: Sequence[GivenResponse]) -> bool:
        long = [*_too_long("", len(ids), "maxPromptTokens", self._max_tokens)]
        for key, response in zip(self._keys, responses, strict=True):
            what, tokens = f" under {key!r}", len(response.tokens) // 4
            long += _too_long(what, tokens, "maxResponseTokens", self._max_response)
        if long and self._prompts.overlong == "Fail":
            raise line.place.bad(f"has {long[0]}; shorten it, raise the limit, or {_FILTER}")
        return bool(long)


def _too_long(what: str, tokens: int, limit: str, most: int) -> Iterator[str]:
    if tokens > most:
        yield f"{tokens} tokens{what}, rollout.{limit} is {most}"
