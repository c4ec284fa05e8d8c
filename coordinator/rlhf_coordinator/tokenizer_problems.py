"""Whether models that read the policy's tokens mean the same by them: reference, critics and draft model.

These models are given token ids, so each must give every token of the policy the same id. Rule: vocabularies are
compared by what the tokenizer files say, never by their sizes; a folder without a tokenizer says nothing, and is taken.
Looks into folders on this disk alone, and downloads nothing. No torch is needed.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from rlhf_api.algorithms import ModelKind, ModelRole, graph_of
from rlhf_api.job import RLHFJobSpec
from rlhf_api.names import DRAFT_MODEL_FIELD
from rlhf_api.vocabularies import difference
from rlhf_api.weight_files import FolderError
from rlhf_coordinator.model_folders import local_folder

VOCABULARY_FILES: Final = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
"""A folder without any of them has no tokenizer."""
OTHER_FILES: Final = ("merges.txt", "added_tokens.json", "special_tokens_map.json", "tokenizer_config.json")
"""Files beside them from which a tokenizer takes tokens or their texts."""
TEMPLATE_FILE: Final = "chat_template.jinja"
REMEDY: Final = (
    "give a model of the actor's tokenizer, or, if its tokens are the actor's all the same, remove the tokenizer files "
    "from its folder"
)


def tokenizer_problems(spec: RLHFJobSpec) -> Iterator[tuple[str, str, FolderError]]:
    """Yield (field, path, what differs) for each model whose tokenizer gives a token of the policy another id."""
    actor = local_folder(spec.models.actor.path)
    for field, path, exact in _readers(spec):
        folder = local_folder(path)
        if actor is None or folder is None or not (_has_tokenizer(actor) and _has_tokenizer(folder)):
            continue
        if actor.samefile(folder) or _files(actor) == _files(folder):
            continue
        try:
            problem = difference(_vocabulary(folder), _vocabulary(actor), exact=exact)
        except FolderError as error:
            yield field, path, error
            continue
        if problem:
            why = f"its tokenizer is another one than that of spec.models.actor.path ({spec.models.actor.path})"
            yield field, path, FolderError("TokenizerMismatch", f"{why}: {problem}; {REMEDY}")


def template_warnings(spec: RLHFJobSpec) -> Iterator[tuple[str, str]]:
    """Yield (field, sentence) for each model that reads conversations rendered by another chat template than its
    own."""
    actor = local_folder(spec.models.actor.path)
    for field, path, _ in _readers(spec) if spec.prompts.chat_template else ():
        folder = local_folder(path)
        if actor is None or folder is None or field == DRAFT_MODEL_FIELD:
            continue
        own = _template(folder)
        if own and own != _template(actor):
            yield field, f"{field}: {path} has another chat template than the actor, and reads the actor's rendering"


def _readers(spec: RLHFJobSpec) -> Iterator[tuple[str, str, bool]]:
    """Yield (field, path, whether further tokens matter) of models with a path of their own that are given the policy's
    tokens."""
    used = graph_of(spec).roles
    for role in ModelRole:
        source = None if role.kind is ModelKind.REWARD or role is ModelRole.ACTOR else spec.models.given(role)
        if source is not None and role in used:
            yield spec.models.path_field(role), source.path, False
    if (draft := spec.generation.speculation.draft_model) is not None:
        yield DRAFT_MODEL_FIELD, draft.path, True


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in VOCABULARY_FILES)


def _files(folder: Path) -> dict[str, bytes]:
    """Return name -> content of the files that a vocabulary is read from."""
    return {
        name: (folder / name).read_bytes() for name in (*VOCABULARY_FILES, *OTHER_FILES) if (folder / name).is_file()
    }


def _vocabulary(folder: Path) -> Mapping[str, int]:
    """Return token -> id, as transformers reads a folder's tokenizer. Raises FolderError."""
    from transformers import AutoTokenizer

    try:
        vocabulary: dict[str, int] = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        ).get_vocab()
    except Exception as error:  # every tokenizer format fails in its own way
        raise FolderError("ModelCorrupt", f"its tokenizer cannot be loaded: {error}; {REMEDY}") from error
    return vocabulary


def _template(folder: Path) -> Any:
    """Return the chat template of a folder; None where it has none."""
    try:
        if (folder / TEMPLATE_FILE).is_file():
            return (folder / TEMPLATE_FILE).read_text(encoding="utf-8")
        return json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")).get("chat_template")
    except (OSError, ValueError, AttributeError):
        return None
