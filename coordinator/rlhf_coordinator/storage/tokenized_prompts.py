"""Tokenizes prompts from their files; prompts that are too long are refused or left out (`Prompts.overlong`).

A bad record is an error with its place (exit code 22).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from rlhf_api.job.rollout import Prompts
from rlhf_common.model_files.model_limits import CONTEXT_FIELD, context_problem
from rlhf_common.names import ExitCode
from rlhf_common.surrogates import has_half_pair
from rlhf_coordinator.failures import JobError
from rlhf_coordinator.storage.given_responses import GivenResponse, text_ids, tokenized_responses
from rlhf_coordinator.storage.policy_limits import FIELD, PolicyLimits
from rlhf_coordinator.storage.prompt_lines import PromptLine, read_lines
from rlhf_coordinator.storage.prompt_places import Place
from rlhf_coordinator.storage.prompt_records import places
from rlhf_coordinator.storage.prompt_warnings import PromptWarnings
from rlhf_coordinator.storage.prompts import Prompt
from rlhf_coordinator.storage.token_warnings import warn_of_prompt_ends, warn_of_turn_end, warn_of_unknown

_CHUNK: Final = 1024
"""Most prompts to tokenize at once."""
UNLIMITED: Final = PolicyLimits()
"""Limits of an unknown policy."""
_FILTER: Final = "leave such lines out with spec.prompts.overlong: Filter"


def read_prompts(
    prompts: Prompts,
    tokenizer: Any,
    max_tokens: int,
    response_keys: Sequence[str] = (),
    max_response_tokens: int = 0,
    *,
    limits: PolicyLimits = UNLIMITED,
) -> list[Prompt]:
    """Return the tokenized records of the files, with the responses under `response_keys`.

    `limits` are those of the policy. Raises JobError, for a bad record with exit code 22 and its place.
    """
    result: list[Prompt] = []
    warnings = PromptWarnings()
    longest = _Longest()
    for source, (file, whole) in enumerate(places(prompts)):
        lines = list(read_lines(prompts, file, whole, tokenizer, response_keys, warnings))
        if not lines:
            raise whole.bad("has no prompts; it needs at least one line with a JSON object, or one row")
        before = result[-1].line if result else 0
        warn_of_turn_end(prompts, whole, tokenizer, limits, warnings)
        sizes = max_tokens, response_keys, max_response_tokens
        source_prompts = _SourcePrompts(prompts, source, before, *sizes, warnings, limits)
        for start in range(0, len(lines), _CHUNK):
            source_prompts.add(lines[start : start + _CHUNK], tokenizer)
        result += source_prompts.all(whole)
        longest = max(longest, source_prompts.longest, key=lambda candidate: candidate.tokens)
    if limits.generates and (problem := context_problem(max_tokens, max_response_tokens, limits.positions)):
        message = f"{problem}; the longest prompt, {longest.place}, has {longest.tokens} tokens"
        raise JobError("ContextTooShort", message, field=CONTEXT_FIELD, exit_code=ExitCode.USAGE)
    return [replace(result[0], warnings=warnings.messages()), *result[1:]]


class _SourcePrompts:
    """The prompts of a source that are not left out."""

    def __init__(
        self,
        prompts: Prompts,
        source: int,
        before: int,
        max_tokens: int,
        keys: Sequence[str],
        max_response: int,
        warnings: PromptWarnings,
        limits: PolicyLimits,
    ) -> None:
        self._prompts, self._source, self._before = prompts, source, before
        self._max_tokens, self._keys, self._max_response = max_tokens, keys, max_response
        self._warnings, self._limits = warnings, limits
        self.longest = _Longest()
        self._result: list[Prompt] = []
        self._filtered = 0

    def add(self, lines: Sequence[PromptLine], tokenizer: Any) -> None:
        """Tokenize some records. Raises JobError."""
        for line in lines:
            if any(map(has_half_pair, (line.text, *(response.written for response in line.responses)))):
                raise line.place.bad("is rendered by the chat template with half a surrogate pair, which is not text")
        special = not self._prompts.chat_template  # a chat template writes the special tokens itself
        encoded = text_ids(tokenizer, [line.text for line in lines], special=special)
        responses_by_line: list[tuple[GivenResponse, ...]] = [()] * len(lines)
        if self._keys:
            responses_by_line = tokenized_responses(
                lines, encoded, tokenizer, special=special, stops=self._limits.stops
            )
        for line, ids, responses in zip(lines, encoded, responses_by_line, strict=True):
            if not ids:
                raise line.place.bad("is an empty prompt: it has no tokens, so there is nothing to continue")
            if self._is_left_out(line, ids, responses):
                self._filtered += 1
                continue
            self._check_limits(line, ids, responses, tokenizer)
            warn_of_prompt_ends(line.place, ids, tokenizer, self._limits, self._warnings)
            if len(ids) > self.longest.tokens:
                self.longest = _Longest(len(ids), line.place)
            tokens = np.array(ids, dtype="<i4").tobytes()
            number = self._before + line.number
            self._result.append(Prompt(number, tokens, line.text, line.record, responses, self._filtered, self._source))
            self._filtered = 0

    def all(self, whole: Place) -> list[Prompt]:
        """Return the prompts. Raises JobError when there are none."""
        if not self._result:
            problem = f"has no line that is short enough: all {self._filtered} are longer than spec.rollout allows"
            raise whole.bad(problem)
        last = self._result[-1]
        self._result[-1] = replace(last, filtered=last.filtered + self._filtered)
        return self._result

    def _check_limits(
        self, line: PromptLine, ids: list[int], responses: Sequence[GivenResponse], tokenizer: Any
    ) -> None:
        """Raise JobError for tokens that the policy does not have, and for a response that is too long with its prompt.

        Warn about characters that the tokenizer does not have.
        """
        response_ids = [np.frombuffer(response.tokens, "<i4").tolist() for response in responses]
        vocabulary, positions = self._limits.vocabulary, self._limits.positions
        for key, tokens in ((self._prompts.prompt_key, ids), *zip(self._keys, response_ids, strict=True)):
            warn_of_unknown(line.place, key, tokens, line.record, tokenizer, self._limits, self._warnings)
            if vocabulary is not None and (largest := max(tokens)) >= vocabulary:
                problem = f"has the token {tokenizer.decode([largest])!r} under {key!r}, whose id is {largest}"
                remedy = "resize the model's embeddings, or remove the token from the text"
                raise line.place.bad(f"{problem}, and the model of {FIELD} has {vocabulary} tokens: {remedy}")
        for key, tokens in zip(self._keys, response_ids, strict=True):
            if positions is not None and (length := len(ids) + len(tokens)) > positions:
                problem = f"has {length} tokens of prompt and response under {key!r}"
                raise line.place.bad(f"{problem}, and the model of {FIELD} has {positions} positions; shorten them")

    def _is_left_out(self, line: PromptLine, ids: list[int], responses: Sequence[GivenResponse]) -> bool:
        long = [*_too_long("", len(ids), "maxPromptTokens", self._max_tokens)]
        for key, response in zip(self._keys, responses, strict=True):
            location, tokens = f" under {key!r}", len(response.tokens) // 4
            long += _too_long(location, tokens, "maxResponseTokens", self._max_response)
        if long and self._prompts.overlong == "Fail":
            raise line.place.bad(f"has {long[0]}; shorten it, raise the limit, or {_FILTER}")
        return bool(long)


@dataclass(frozen=True, slots=True)
class _Longest:
    """The prompt with the most tokens."""

    tokens: int = 0
    place: Place | None = None


def _too_long(location: str, tokens: int, limit: str, most: int) -> Iterator[str]:
    if tokens > most:
        yield f"{tokens} tokens{location}, rollout.{limit} is {most}"
