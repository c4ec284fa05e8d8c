"""Finds unusable model folders of a job. Rule: it reads what is on this disk and downloads nothing."""

from collections.abc import Iterator
from pathlib import Path

from rlhf_api.algorithms import ModelKind, ModelRole
from rlhf_api.job import RLHFJobSpec
from rlhf_api.peft_folder_check import AdapterError, check_adapter_config, check_adapter_tensors
from rlhf_common.model_files.companion_files import companion_files
from rlhf_common.model_files.model_folder_check import check_model_folder
from rlhf_common.model_files.weight_files import MISSING, FolderError, WeightFiles, read_weight_files
from rlhf_common.names import ADAPTER_FIELD, DRAFT_MODEL_FIELD, ExitCode
from rlhf_coordinator.failures import JobError
from rlhf_coordinator.tokenizer_problems import tokenizer_problems


def model_folder_problems(spec: RLHFJobSpec) -> Iterator[tuple[str, str, FolderError]]:
    """Yield (field, path, error) for the models, the initial adapters and the tokenizers of a resolved job."""
    checked: set[tuple[str, bool]] = set()
    for field, path, head in _models(spec):
        if {(path, head), (path, True)} & checked or not Path(path).is_absolute() or not Path(path).is_dir():
            continue
        checked.add((path, head))
        try:
            check_model_folder(Path(path), head=head)
            companion_files(Path(path))
        except FolderError as error:
            checked.add((path, True))
            yield field, path, error
    yield from _adapter_problems(spec)
    yield from tokenizer_problems(spec)


def check_model_folders(spec: RLHFJobSpec) -> None:
    """Raise JobError for the first problem of a model folder, except that of a missing file."""
    for field, path, error in model_folder_problems(spec):
        if error.reason == MISSING:
            continue
        message = str(error) if isinstance(error, AdapterError) else f"{path}: {error}"
        raise JobError(error.reason, message, field=field, exit_code=ExitCode.BAD_MODEL)


def _adapter_problems(spec: RLHFJobSpec) -> Iterator[tuple[str, str, FolderError]]:
    """Yield the first problem of the actor's initial adapters, if any, in the form of `model_folder_problems`."""
    lora = spec.training.lora
    if lora is None or lora.adapter is None or not Path(lora.adapter).is_absolute() or not Path(lora.adapter).is_dir():
        return
    folder, base = Path(lora.adapter), Path(spec.models.actor.path)
    try:
        check_adapter_config(folder, lora, base_path=spec.models.actor.path)
        check_adapter_tensors(folder, lora, _weights(base))
    except FolderError as error:
        field = error.field if isinstance(error, AdapterError) and error.field else ADAPTER_FIELD
        yield field, lora.adapter, error


def _weights(folder: Path) -> WeightFiles | None:
    """Return the weights of a folder; None if it is no absolute path of a folder here, or they are unreadable."""
    try:
        return read_weight_files(folder) if folder.is_absolute() and folder.is_dir() else None
    except FolderError:
        return None


def _models(spec: RLHFJobSpec) -> Iterator[tuple[str, str, bool]]:
    """Yield (field, path, whether the head of the language model is used) for every model that a manifest sets."""
    for role in ModelRole:
        source = spec.models.explicit_source(role) if role.kind is not ModelKind.REWARD else None
        if source is not None:
            yield spec.models.path_field(role), source.path, role.kind is ModelKind.POLICY
    for named in spec.models.all_rewards:
        reward = named.reward
        if (own := reward.own_model) is not None:
            yield f"{named.field}.{reward.own_model_field}.path", own.path, reward.judge is not None
    if (draft := spec.generation.speculation.draft_model) is not None:
        yield DRAFT_MODEL_FIELD, draft.path, True
