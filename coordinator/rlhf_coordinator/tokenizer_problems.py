"""Checks whether models that get the policy's tokens agree on their meaning and on the chat format."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from rlhf_api.algorithms import ModelKind, ModelRole, graph_of
from rlhf_api.job import RLHFJobSpec
from rlhf_common.chats import TOOLS
from rlhf_common.json_document import parse_json
from rlhf_common.model_files.vocabularies import MISMATCH, REMEDY, tokenizer_problem
from rlhf_common.model_files.weight_files import FolderError
from rlhf_coordinator.model_folders import local_folder

TEMPLATE_FILE: Final = "chat_template.jinja"


def tokenizer_problems(spec: RLHFJobSpec) -> Iterator[tuple[str, str, FolderError]]:
    """Yield (field, path, error) for each model of `_readers` whose tokenizer is unreadable or gives a token another id
    than the actor's."""
    for field, path, folder, actor in _readers(spec):
        try:
            if problem := tokenizer_problem(folder, actor, _vocabulary):
                yield field, path, FolderError(MISMATCH, problem)
        except FolderError as error:
            yield field, path, error


def template_warnings(spec: RLHFJobSpec) -> Iterator[tuple[str, str]]:
    """Yield (field, sentence) for each model of `_readers` whose own chat template differs from that of the prompts."""
    file = spec.prompts.chat_template_file
    for field, path, folder, actor in _readers(spec) if spec.prompts.chat_template else ():
        own, used = _template(folder), _template(actor) if file is None else _text(Path(file))
        if own and own != used:
            source = "the actor" if file is None else "spec.prompts.chatTemplateFile"
            yield field, f"{field}: {path} has another chat template than {source}, and reads prompts in that one"


def tools_warnings(spec: RLHFJobSpec) -> Iterator[str]:
    """Yield a sentence for each reward model here whose chat template does not mention tools; none where the job uses
    no chat template."""
    for named in spec.models.all_rewards if spec.prompts.chat_template else ():
        source = named.reward.model
        folder = None if source is None else local_folder(source.path)
        own = None if folder is None else _template(folder)
        if source is not None and own and TOOLS not in json.dumps(own):
            field = f"{named.field}.model.path"
            yield f"{field}: {source.path} has a chat template that does not write the tools of prompts"


def _readers(spec: RLHFJobSpec) -> Iterator[tuple[str, str, Path, Path]]:
    """Yield (field, path, folder, the actor's folder) of the graph's models, except rewards and the policy.

    A model that the manifest does not set, or that is not on this disk, is left out.
    """
    actor, graph = local_folder(spec.models.actor.path), graph_of(spec)
    for role in ModelRole:
        source = None if role.kind is ModelKind.REWARD or role is graph.policy else spec.models.explicit_source(role)
        folder = None if source is None or role not in graph.roles else local_folder(source.path)
        if source is not None and folder is not None and actor is not None:
            yield spec.models.path_field(role), source.path, folder, actor


def _vocabulary(folder: Path) -> Mapping[str, int]:
    """Return token -> id, as transformers reads a folder's tokenizer. Raises FolderError."""
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        vocabulary: dict[str, int] = tokenizer.get_vocab()
    except Exception as error:  # every tokenizer format fails in its own way
        raise FolderError("ModelCorrupt", f"its tokenizer cannot be loaded: {error}; {REMEDY}") from error
    return vocabulary


def _text(path: Path) -> str | None:
    """Return the content of a file; None if it is unreadable."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None


def _template(folder: Path) -> Any:
    """Return the chat template of a folder; None where it has none, or its file is unreadable."""
    try:
        if (folder / TEMPLATE_FILE).is_file():
            return _text(folder / TEMPLATE_FILE)
        return parse_json((folder / "tokenizer_config.json").read_text(encoding="utf-8")).get("chat_template")
    except (OSError, ValueError, AttributeError):
        return None
