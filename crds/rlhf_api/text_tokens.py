"""From text to tokens and back, by a tokenizer of transformers that the caller has.

A prompt begins as the tokenizer begins a text, once, and nothing ends it: the model is to continue it. The text of a
response has all of its tokens but those that end it. Rule: pure; coordinator and workers read and write text by these
functions, so that all of them see the same. Must never let a tokenizer add or drop a token in silence.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

PROBES: Final = ("a", "0", "的", "\n")
"""Texts by which a tokenizer shows what it adds to a text: the first one that it has tokens for."""


@dataclass(frozen=True, slots=True)
class AddedTokens:
    """Tokens that a tokenizer adds to every text."""

    start: list[int]
    end: list[int]


def added_tokens(tokenizer: Any) -> AddedTokens:
    """Return the tokens that the tokenizer adds before and after a text.

    Raises ValueError where it does not leave the text's own tokens as they are.
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
    """Return the tokens of plain texts that a model is to continue.

    Each begins with the tokenizer's first token, once, also where the text names it, and has no last one. Raises
    ValueError as `added_tokens`.
    """
    own: list[list[int]] = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    added = added_tokens(tokenizer)
    return [_started(ids, added) if ids else _of_empty_text(tokenizer, added) for ids in own]


def _started(ids: list[int], added: AddedTokens) -> list[int]:
    return ids if ids[: len(added.start)] == added.start else [*added.start, *ids]


def _of_empty_text(tokenizer: Any, added: AddedTokens) -> list[int]:
    """Return the first token alone, where the tokenizer begins an empty text, too."""
    [ids] = tokenizer([""], add_special_tokens=True)["input_ids"]
    return list(ids[: max(0, len(ids) - len(added.end))])
