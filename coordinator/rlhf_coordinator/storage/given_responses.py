"""Responses of the prompt file as tokens after those of the prompt.

Prompt and response are tokenized together; if that does not continue the prompt's tokens, the response is tokenized
alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlhf_common.model_files.text_tokens import prompt_tokens
from rlhf_common.names import ExitCode
from rlhf_coordinator.failures import JobError
from rlhf_coordinator.storage.prompt_lines import PromptLine


@dataclass(frozen=True, slots=True)
class GivenResponse:
    """A response of the prompt file."""

    tokens: bytes
    """Token ids as int32, little endian, including the one at which generation stops."""
    text: str


def tokenized_responses(
    lines: Sequence[PromptLine],
    prompts: Sequence[list[int]],
    tokenizer: Any,
    *,
    special: bool,
    stops: frozenset[int] = frozenset(),
) -> list[tuple[GivenResponse, ...]]:
    """Return the responses of each line. Raises JobError where the tokenizer has no end-of-sequence token.

    `special`: the tokenizer adds its special tokens. `stops`: further ids at which generation stops.
    """
    end = tokenizer.eos_token_id
    if end is None:
        message = "its tokenizer has no end-of-sequence token, so no model could learn where a response ends; add one"
        raise JobError("BadData", message, field="spec.models.actor.path", exit_code=ExitCode.BAD_DATA)
    asked = [
        (line.text, response, tokens)
        for line, tokens in zip(lines, prompts, strict=True)
        for response in line.responses
    ]
    whole = text_ids(tokenizer, [prompt + said.written for prompt, said, _ in asked], special=special)
    alone = tokenizer([said.written for _, said, _ in asked], add_special_tokens=False)["input_ids"]
    written = (
        together[len(prompt) :] if together[: len(prompt)] == prompt and len(together) > len(prompt) else separate
        for (_, _, prompt), together, separate in zip(asked, whole, alone, strict=True)
    )
    ended = (_ended(ids, end, stops | {end}, None if special else tokenizer) for ids in written)
    return [
        tuple(GivenResponse(np.array(next(ended), dtype="<i4").tobytes(), said.text) for said in line.responses)
        for line in lines
    ]


def text_ids(tokenizer: Any, texts: Sequence[str], *, special: bool) -> list[list[int]]:
    """Return the tokens of texts; `special`: whether they begin with the tokenizer's first tokens. Raises JobError."""
    if not special:
        return list(tokenizer(list(texts), add_special_tokens=False)["input_ids"])
    try:
        return prompt_tokens(tokenizer, texts)
    except ValueError as error:
        field = "spec.models.actor.path"
        raise JobError("ModelUnsupported", str(error), field=field, exit_code=ExitCode.BAD_MODEL) from error


def _ended(ids: list[int], end: int, stops: frozenset[int], template_tokenizer: Any | None) -> list[int]:
    """Return the tokens of a response, ending with one at which generation stops.

    `template_tokenizer` is None where no template wrote the tokens.
    """
    last = next((at for at in range(len(ids) - 1, -1, -1) if ids[at] in stops), None)
    if last is None:
        return [*ids, end]
    after = ids[last + 1 :]
    if not after or (template_tokenizer is not None and not template_tokenizer.decode(after).strip()):
        return ids[: last + 1]
    return [*ids, end]
