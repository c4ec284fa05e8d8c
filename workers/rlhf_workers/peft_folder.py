"""Folders of adapters as PEFT writes and reads them: names of tensors, adapter_config.json, and what of it is taken.

Rule: a folder is refused, with the field and both values, unless its adapters are those that the manifest describes;
what the manifest cannot say (other scales, other ranks for some matrices, trained biases) is refused by name. Must
never guess.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from rlhf_api.job.lora import Lora
from rlhf_api.names import ADAPTER_CONFIG, ExitCode
from rlhf_workers.failures import WorkError

PREFIX: Final = "base_model.model."
"""Begins the name of every tensor in a PEFT folder."""
FIELD: Final = "spec.training.lora"
A_SUFFIX: Final = ".lora_A.weight"
B_SUFFIX: Final = ".lora_B.weight"
"""End the names of the two factors, behind the name of the matrix's module."""
SETTINGS: Final = {"r": "rank", "lora_alpha": "alpha", "target_modules": "targetModules"}
"""Key of adapter_config.json -> field of the manifest."""
WITHOUT: Final[Mapping[str, tuple[Any, ...]]] = {
    "use_rslora": (None, False), "use_dora": (None, False), "fan_in_fan_out": (None, False), "bias": (None, "none"),
    "rank_pattern": (None, {}), "alpha_pattern": (None, {}), "layers_to_transform": (None, []),
}  # fmt: skip
"""Key of adapter_config.json -> the values that say that there is nothing of the kind."""


def peft_name(name: str) -> str:
    """Return the name of a parameter in a PEFT folder."""
    return f"{PREFIX}{name}"


def config(settings: Lora, base: str, saved_whole: tuple[str, ...]) -> dict[str, Any]:
    """Return adapter_config.json of a model whose frozen weights are those of `base`.

    `saved_whole`: modules that are trained and saved in full, such as a value head.
    """
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if saved_whole else "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(settings.target_modules),
        "modules_to_save": list(saved_whole) or None,
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def check(folder: Path, settings: Lora, field: str = FIELD) -> None:
    """WorkError AdapterMismatch when a PEFT folder is of other adapters than these; `field` names the folder."""
    file = folder / ADAPTER_CONFIG
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise mismatch(field, f"{folder} has no {ADAPTER_CONFIG}: it was saved without adapters") from None
    except (OSError, ValueError) as error:
        raise mismatch(field, f"{file} cannot be read: {error}") from error
    if not isinstance(found, Mapping) or found.get("peft_type") != "LORA":
        raise mismatch(field, f"{file} describes no LoRA adapters (peft_type)")
    wanted = config(settings, "", ())
    for key, name in SETTINGS.items():
        ours, theirs = wanted[key], found.get(key)
        if key == "target_modules" and isinstance(theirs, list):
            ours, theirs = sorted(ours), sorted(map(str, theirs))
        if ours != theirs:
            raise mismatch(f"{FIELD}.{name}", f"is {ours}, and {file} was saved with {theirs}: use {theirs}")
    for key, none in WITHOUT.items():
        if found.get(key) not in none:
            raise mismatch(
                field, f"{file} has {key}: {found[key]!r}, which is not trained here: merge it into a folder"
            )


def mismatch(field: str, why: str) -> WorkError:
    """Return the failure of a folder of other adapters than those of the manifest."""
    return WorkError("AdapterMismatch", f"{field}: {why}", field=field, exit_code=ExitCode.BAD_MODEL)
