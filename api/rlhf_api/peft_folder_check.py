"""Checks that a folder of PEFT adapters matches `spec.training.lora`.

An unknown key of adapter_config.json is rejected unless its value means "unused".
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from rlhf_api.job.lora import EVERY_TARGET, Lora
from rlhf_common.json_document import parse_json
from rlhf_common.model_files.weight_files import FolderError, TensorEntry, WeightFiles, read_header
from rlhf_common.names import ADAPTER_CONFIG, ADAPTER_FIELD, ADAPTER_WEIGHTS

LORA_FIELD: Final = "spec.training.lora"
PREFIX: Final = "base_model.model."
"""Prefix of every tensor name in a PEFT folder."""
A_SUFFIX: Final = ".lora_A.weight"
B_SUFFIX: Final = ".lora_B.weight"
"""Suffixes of the two factors, after the module name of the matrix."""
SETTINGS: Final = {"r": "rank", "lora_alpha": "alpha"}
"""Key of the configuration -> field of the manifest."""
TARGETS: Final = "target_modules"
CHANGE_NOTHING: Final = frozenset(
    {
        *(
            "auto_mapping",
            "base_model_name_or_path",
            "peft_version",
        ),  # origin; the manifest names the base
        "inference_mode",  # whether PEFT may train the adapters
        "lora_dropout",  # for PEFT's own training; a loaded adapter has no dropout
        "eva_config",  # initialisation of A before training
        "megatron_core",  # read only with megatron_config
        "qalora_group_size",  # read only with use_qalora
        "revision",  # of the base; `check_adapter_config` compares it if the base is no folder
        *SETTINGS,  # compared with the manifest
        TARGETS,
    }
)
"""Keys of PEFT 0.21's LoraConfig that do not affect loaded adapters, or are compared elsewhere."""
ACCEPTED: Final[Mapping[str, tuple[Any, ...]]] = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM",),
    "bias": ("none",),
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal", "mica"),  # all others change the base as PEFT loads it
}
"""Key -> values that mean plain adapters, in addition to those that mean "unused"."""
CHANGES_BASE: Final = "with it, PEFT changes the base model when it loads the adapters, but here the base stays"
OWN_KEYS: Final = frozenset({"task_type", "modules_to_save"})
"""Keys with which a checkpoint of this project names the head that it contains in full."""
REMEDY: Final = (
    "load the adapters with PEFT, save model.merge_and_unload() to a folder, give it as spec.models.actor.path, and "
    f"leave {ADAPTER_FIELD} out"
)
_FLOATS: Final = frozenset({"F64", "F32", "F16", "BF16"})
_WHOLE_NAME: Final = re.compile(r"^model\.layers\.\d+\.\w+\.")
"""Prefix of the full name of a matrix of a layer."""
_MAIN: Final = "main"
"""Default revision of a hub id."""


class AdapterError(FolderError):
    """Adapters that do not match the manifest; `field` is the manifest's, or empty for an error within the folder."""

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__("AdapterMismatch", message)
        self.field = field


def check_adapter_config(folder: Path, settings: Lora, *, own: bool = False, base_path: str = "/") -> None:
    """Raise AdapterError unless adapter_config.json describes adapters with these settings.

    `own`: it is a checkpoint of this project. `base_path`: the manifest's path of the frozen weights.
    """
    file = folder / ADAPTER_CONFIG
    config = _read_config(folder)
    if config.get("peft_type") != "LORA":
        raise AdapterError(
            f"{file} has peft_type {config.get('peft_type')!r}, and only 'LORA' is trained here; {REMEDY}"
        )
    for key, value in config.items():
        if key in CHANGE_NOTHING or (own and key in OWN_KEYS) or _means_nothing(value):
            continue
        if not any(
            value is accepted or (isinstance(value, str) and value == accepted) for accepted in ACCEPTED.get(key, ())
        ):
            why = f": {CHANGES_BASE}" if key == "init_lora_weights" else ", which is not trained here"
            raise AdapterError(f"{file} has {key}: {value!r}{why}; {REMEDY}")
    revision = config.get("revision")
    if not (_means_nothing(revision) or revision == _MAIN or Path(base_path).is_absolute()):
        why = f"revision: {revision!r} of its base, and spec.models.actor.path is {base_path!r}"
        raise AdapterError(f"{file} has {why}: give a folder of that revision there")
    _check_settings(file, config, settings)


def check_adapter_tensors(folder: Path, settings: Lora, base: WeightFiles | None = None) -> None:
    """Raise AdapterError unless the folder contains A and B of matrices in the settings, as floats, and nothing else.

    `base`: the weights that the adapters extend, if known. Raises FolderError for a damaged file.
    """
    file = folder / ADAPTER_WEIGHTS
    if not file.is_file():
        pickled = file.with_suffix(".bin")
        why = (
            f"it has {pickled.name}, which is never read: save it with safe_serialization" if pickled.is_file() else ""
        )
        raise AdapterError(f"{folder} has no {file.name}{': ' if why else ''}{why}")
    tensors = read_header(file)
    for name, entry in tensors.items():
        module = _module_of(name)
        if module is None or module.rpartition(".")[2] not in settings.target_modules:
            raise AdapterError(
                f"{file} holds {name}, which is neither lora_A.weight nor lora_B.weight of a module of "
                f"{LORA_FIELD}.targetModules ({', '.join(settings.target_modules)}); {REMEDY}"
            )
        if entry.dtype not in _FLOATS:
            raise AdapterError(f"{file} holds {name} as {entry.dtype}: save it as float32, bfloat16 or float16")
    modules = {module for name in tensors if (module := _module_of(name)) is not None}
    _check_modules(file, tensors, modules, settings, base)


def _check_modules(
    file: Path, tensors: Mapping[str, TensorEntry], modules: set[str], settings: Lora, base: WeightFiles | None
) -> None:
    matrices = {} if base is None else _matrices(base, settings)
    for module in sorted(modules | matrices.keys()):
        factors = [tensors.get(f"{PREFIX}{module}{suffix}") for suffix in (A_SUFFIX, B_SUFFIX)]
        if not all(factors):
            suffix = A_SUFFIX if factors[0] is None else B_SUFFIX
            raise AdapterError(f"{file} has no {PREFIX}{module}{suffix}, and {LORA_FIELD} trains it; {REMEDY}")
        if base is None:
            continue
        if module not in matrices:
            raise AdapterError(f"{file} holds adapters of {module}, which the model of spec.models.actor.path lacks")
        rows, columns = matrices[module].shape
        for entry, suffix, shape in zip(
            factors, (A_SUFFIX, B_SUFFIX), ((settings.rank, columns), (rows, settings.rank)), strict=True
        ):
            assert entry is not None  # the check above found all
            if entry.shape != shape:
                found_tensor = f"{PREFIX}{module}{suffix} of shape {list(entry.shape)}"
                raise AdapterError(
                    f"{file} holds {found_tensor}, the model of spec.models.actor.path needs {list(shape)}"
                )


def _matrices(base: WeightFiles, settings: Lora) -> dict[str, TensorEntry]:
    """Return module -> weight of every linear map of the base that the settings name."""
    named = ((name.removesuffix(".weight"), entry) for name, entry in base.tensors.items() if name.endswith(".weight"))
    return {
        name: entry
        for name, entry in named
        if name.rpartition(".")[2] in settings.target_modules and len(entry.shape) == 2
    }


def _module_of(name: str) -> str | None:
    """Return the module of an adapter's tensor; None for every other tensor."""
    suffix = next((suffix for suffix in (A_SUFFIX, B_SUFFIX) if name.endswith(suffix)), None)
    if suffix is None or not name.startswith(PREFIX):
        return None
    return name.removeprefix(PREFIX).removesuffix(suffix)


def _check_settings(file: Path, config: Mapping[str, Any], settings: Lora) -> None:
    for key, name in SETTINGS.items():
        ours, theirs = getattr(settings, name), config.get(key)
        if isinstance(theirs, bool) or ours != theirs:
            raise AdapterError(f"is {ours}, and {file} was saved with {theirs}: use {theirs}", f"{LORA_FIELD}.{name}")
    theirs = list(EVERY_TARGET) if config.get(TARGETS) == "all-linear" else config.get(TARGETS)
    # PEFT writes all-linear as full module names; `check_adapter_tensors` finds the one without adapters.
    ends = [_WHOLE_NAME.sub("", str(name)) for name in theirs] if isinstance(theirs, list) else []
    if not ends or not set(ends) <= set(EVERY_TARGET):
        names = ", ".join(EVERY_TARGET)
        raise AdapterError(f"{file} has {TARGETS}: {theirs!r}, and only {names} have adapters here; {REMEDY}")
    if set(ends) != set(settings.target_modules):
        ours, theirs = sorted(settings.target_modules), sorted(set(ends))
        raise AdapterError(
            f"is {ours}, and {file} was saved with {theirs}: use {theirs}", f"{LORA_FIELD}.targetModules"
        )


def _read_config(folder: Path) -> dict[str, Any]:
    file = folder / ADAPTER_CONFIG
    try:
        config = parse_json(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise AdapterError(f"{folder} has no {ADAPTER_CONFIG}: it was saved without adapters") from None
    except (OSError, ValueError) as error:
        raise AdapterError(f"{file} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise AdapterError(f"{file} describes no LoRA adapters (peft_type)")
    return config


def _means_nothing(value: object) -> bool:
    """Return whether a value means "unused". 0 does not: it may be the number of a layer."""
    return value is None or value is False or value in ("", [], {})
