"""Conversion from text to tokens and back, with the caller's transformers tokenizer. Pure.

A plain prompt gets the tokenizer's start tokens, but no end tokens.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rlhf_common.model_files.model_limits import end_ids

TURN: Final = "rlhf-turn-0f6b"
"""Placeholder for a turn in trials of a chat template."""
PROBES: Final = ("a", "0", "的", "\n")
"""Texts that show what a tokenizer adds; the first one for which it has tokens is used, or else the last."""


@dataclass(frozen=True, slots=True)
class AddedTokens:
    """Tokens that a tokenizer adds before and after a text."""

    start: list[int]
    end: list[int]


def added_tokens(tokenizer: Any) -> AddedTokens:
    """Return the tokens that the tokenizer adds before and after a text.

    Raises ValueError if it changes the text's own tokens.
    """
    probe, alone = next(
        (probe, ids)
        for probe in PROBES
        if (ids := tokenizer([probe], add_special_tokens=False)["input_ids"][0]) or probe == PROBES[-1]
    )
    [whole] = tokenizer([probe], add_special_tokens=True)["input_ids"]
    for start in range(len(whole) - len(alone) + 1):
        end = start + len(alone)
        if whole[start:end] == alone and (alone or not whole):
            return AddedTokens(list(whole[:start]), list(whole[end:]))
    raise ValueError(f"its tokenizer gives {probe!r} the tokens {alone}, and with special tokens {whole}")


def prompt_tokens(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Return the tokens of plain texts that a model continues: start tokens are added unless the text begins with them,
    end tokens are not added. Raises ValueError like `added_tokens`.
    """
    own: list[list[int]] = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    added = added_tokens(tokenizer)
    return [_started(ids, added) if ids else _of_empty_text(tokenizer, added) for ids in own]


def _started(ids: list[int], added: AddedTokens) -> list[int]:
    start = added.start
    written = next(length for length in range(len(start), -1, -1) if ids[:length] == start[:length])
    return [*start, *ids[written:]]


def _of_empty_text(tokenizer: Any, added: AddedTokens) -> list[int]:
    """Return the start tokens, if the tokenizer adds them to an empty text too."""
    [ids] = tokenizer([""], add_special_tokens=True)["input_ids"]
    return list(ids[: max(0, len(ids) - len(added.end))])


def response_text(tokenizer: Any, tokens: Sequence[int], ends: Collection[int]) -> str:
    """Return the text of a response without trailing `ends`. Other special tokens are text."""
    length = len(tokens)
    while length and tokens[length - 1] in ends:
        length -= 1
    own = list(tokens[:length])
    return str(tokenizer.decode(own, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def text_ends(tokenizer: Any, generation_ends: Any = None, stop_ids: Collection[int] = ()) -> frozenset[int]:
    """Return the ids that are not text at the end of a response: padding, end tokens and special tokens of `stop_ids`.

    `generation_ends`: end tokens of the model's generation defaults. If the chat template ends turns with tokens, only
    those of `stop_ids` among them count: a tag such as </tool_call> stays.
    """
    marks = turn_marks(tokenizer, tokenizer.apply_chat_template) if stop_ids and tokenizer.chat_template else []
    added_tokens = tokenizer.added_tokens_decoder if stop_ids else {}
    named = [token for token in stop_ids if token in added_tokens and added_tokens[token].special]
    return frozenset(
        [
            *end_ids(tokenizer.eos_token_id, tokenizer.pad_token_id, generation_ends),
            *(token for token in named if token in marks or not marks),
        ]
    )


def turn_marks(tokenizer: Any, render: Callable[..., Any]) -> list[int]:
    """Return the added tokens that a chat template writes after a response; empty if it rejects the trial.

    `render`: like the tokenizer's `apply_chat_template`.
    """
    messages = [{"role": "user", "content": TURN}, {"role": "assistant", "content": TURN}]
    try:
        _, _, end = str(render(messages, tokenize=False, add_generation_prompt=False)).rpartition(TURN)
    except Exception:  # templates are user data and may raise anything
        return []
    [written] = tokenizer([end], add_special_tokens=False)["input_ids"]
    return [token for token in written if token in tokenizer.added_tokens_decoder]
