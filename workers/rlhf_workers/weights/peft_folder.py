"""Adapter folders in PEFT's format: tensor names, and adapter_config.json of a checkpoint.

Rule: `rlhf_api.peft_folder_check` decides which folders are valid; this module turns its errors into WorkErrors.
"""

from pathlib import Path
from typing import Any

from rlhf_api.job.lora import Lora
from rlhf_api.peft_folder_check import PREFIX, AdapterError, check_adapter_config, check_adapter_tensors
from rlhf_common.model_files.weight_files import FolderError
from rlhf_common.names import ADAPTER_FIELD, ExitCode
from rlhf_workers.failures import WorkError


def peft_name(name: str) -> str:
    """Return the name of a parameter in a PEFT folder."""
    return f"{PREFIX}{name}"


def config(settings: Lora, base: str, saved_whole: tuple[str, ...]) -> dict[str, Any]:
    """Return adapter_config.json for a model with the frozen weights of `base`.

    `saved_whole`: modules saved in full, such as a value head.
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


def check(folder: Path, settings: Lora, field: str, base_path: str = "/") -> None:
    """Raise WorkError AdapterMismatch when a PEFT folder has other adapters than `settings`.

    `field` names the folder, a checkpoint unless it is `ADAPTER_FIELD`. `base_path`: folder of frozen weights.
    """
    try:
        check_adapter_config(folder, settings, own=field != ADAPTER_FIELD, base_path=base_path)
        if field == ADAPTER_FIELD:
            check_adapter_tensors(folder, settings)
    except AdapterError as error:
        raise mismatch(error.field or field, str(error)) from error
    except FolderError as error:
        raise mismatch(field, f"{folder}: {error}") from error


def mismatch(field: str, why: str) -> WorkError:
    """Return the failure for an adapter folder that cannot be used with this manifest."""
    return WorkError("AdapterMismatch", f"{field}: {why}", field=field, exit_code=ExitCode.BAD_MODEL)
