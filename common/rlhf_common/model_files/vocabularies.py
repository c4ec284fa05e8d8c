"""Checks, by the tokenizer files, that a model that reads the policy's token ids gives them the same meaning."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

VOCABULARY_FILES: Final = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
"""Vocabulary files; a folder without any of them has no tokenizer."""
OTHER_FILES: Final = ("merges.txt", "added_tokens.json", "special_tokens_map.json", "tokenizer_config.json")
"""Other files from which a tokenizer takes tokens or their texts."""
MISMATCH: Final = "TokenizerMismatch"
"""Failure reason for a model with another vocabulary."""
REMEDY: Final = (
    "give a model of the actor's tokenizer, or, if its tokens are the actor's all the same, remove the tokenizer files "
    "from its folder"
)


def tokenizer_problem(folder: Path, actor: Path, read: Callable[[Path], Mapping[str, int]]) -> str:
    """Return a message with the first policy token that has another meaning in the model of `folder`; empty if there is
    none, or a folder has no tokenizer. `read` returns token -> id of a folder's tokenizer.
    """
    if not (_has_tokenizer(actor) and _has_tokenizer(folder)):
        return ""
    if actor.samefile(folder) or _files(actor) == _files(folder):
        return ""
    problem = difference(read(folder), read(actor), exact=False)
    whose = f"its tokenizer differs from that of spec.models.actor.path ({actor})"
    return f"{whose}: {problem}; {REMEDY}" if problem else ""


def difference(theirs: Mapping[str, int], policy: Mapping[str, int], *, exact: bool = True) -> str:
    """Return a message about the first token that differs between another model's vocabulary and the policy's; empty if
    none.

    `exact`: whether a token that the policy lacks is a difference, too.
    """
    for token, number in sorted(policy.items(), key=lambda item: (item[1], item[0])):
        if theirs.get(token) != number:
            said = "does not have it" if token not in theirs else f"gives it the number {theirs[token]}"
            return f"the policy's token {number} is {token!r}, and its tokenizer {said}"
    extra = min((token for token in theirs if token not in policy), key=lambda token: theirs[token], default=None)
    return f"its tokenizer has the token {extra!r}, which the policy's has not" if exact and extra is not None else ""


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in VOCABULARY_FILES)


def _files(folder: Path) -> dict[str, bytes]:
    """Return name -> content of the files of a vocabulary."""
    present = [name for name in (*VOCABULARY_FILES, *OTHER_FILES) if (folder / name).is_file()]
    return {name: (folder / name).read_bytes() for name in present}
