"""The model card, README.md of a folder on a hub: the base model, the data, the method and the results.

Rule: pure. The card shows the last part of a path on a machine, and no address of an endpoint or judge.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, Final

import yaml

from rlhf_api.algorithms import ModelKind, ModelRole
from rlhf_api.job import RLHFJob
from rlhf_api.job.rewards import GivenReward

_TASKS: Final = {ModelKind.POLICY: "text-generation", ModelKind.REWARD: "text-classification"}
"""Kind of model -> its task in the hub's terms."""
_NUMBERS: Final = (
    ("reward_first", "reward, mean over the first tenth of the iterations"),
    ("reward_last", "reward, mean over the last tenth"),
    ("loss", "loss of the last iteration"),
    ("samples", "samples"),
    ("seconds", "seconds"),
)
"""Entries of a run's summary that a card shows, with their labels."""


@dataclass(frozen=True)
class ExportedModel:
    """The model that a card describes."""

    job: RLHFJob
    role: ModelRole
    version: int
    """Weight version: number of iterations of training."""
    adapters: bool
    """Whether the folder contains adapters over a base model instead of a whole model."""
    summary: Mapping[str, Any] = field(default_factory=dict)
    """Summary of the run; empty when none can be read."""
    evaluation_reward: float | None = None
    """Evaluation reward of this version, if it is the best one evaluated."""
    exported_by: str = ""
    """Version of this project that exported the model; empty if unknown."""


def model_card(model: ExportedModel) -> str:
    """Return the text of README.md."""
    job, spec = model.job, model.job.spec
    source = spec.models.source(model.role)
    base = source.path if source is not None else ""
    metadata: dict[str, Any] = {
        "library_name": "peft" if model.adapters else "transformers",
        "tags": ["rlhf", job.spec.algorithm.name],
    }
    if task := _TASKS.get(model.role.kind):
        metadata["pipeline_tag"] = task
    if is_hub_id(base):
        metadata["base_model"] = base
    rows = [
        ("algorithm", f"{spec.algorithm.name} ({spec.algorithm.fields.summary.rstrip('.')})"),
        ("base model", base if is_hub_id(base) else PurePath(base).name),
        ("iterations", f"{model.version} of {spec.iterations}"),
        ("samples an iteration", str(spec.rollout.batch_size)),
        ("rewards", ", ".join(_reward(entry) for entry in spec.models.all_rewards) or "none"),
        ("prompts", _shown(", ".join(PurePath(file.path).name for file in spec.prompts.files))),
        ("seed", f"{spec.seed}{' (deterministic)' if spec.deterministic else ''}"),
        ("learning rate", f"{spec.training.optimizer.peak_learning_rate(model.role):g}"),
        ("trained weights", "low-rank adapters" if model.adapters else "all, saved as float32"),
    ]
    if model.evaluation_reward is not None:
        rows.append(("evaluation reward of this version, the best of the run", f"{model.evaluation_reward:.4g}"))
    # The summary covers the whole run, so it applies only to the run's last version.
    summary = model.summary if model.summary.get("weight_version") == model.version else {}
    for name, words in _NUMBERS:
        if isinstance(value := summary.get(name), int | float):
            rows.append((words, f"{value:.6g}"))
    if model.exported_by:
        rows.append(("exported by", f"rlhf-operator {model.exported_by}"))
    table = "\n".join(f"| {name} | {_shown(value)} |" for name, value in rows)
    front = yaml.safe_dump(metadata, sort_keys=False)
    return f"---\n{front}---\n\n# {_shown(job.name)}\n\nTrained with rlhf-operator.\n\n| | |\n|---|---|\n{table}\n"


def generation_config(job: RLHFJob, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return generation settings for a policy whose folder has none: sampling as in its training."""
    rollout = job.spec.rollout
    sampled = rollout.temperature > 0
    settings: dict[str, Any] = {"do_sample": sampled, "max_new_tokens": rollout.max_response_tokens}
    if sampled:
        settings |= {"temperature": rollout.temperature, "top_p": rollout.top_p, "top_k": rollout.top_k}
    ids = {name: config.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return settings | {name: value for name, value in ids.items() if value is not None}


def is_hub_id(source: str) -> bool:
    """Return whether a model's source has the form `owner/name` of a hub."""
    parts = source.split("/")
    return len(parts) == 2 and all(part and part[0] not in ".~" for part in parts)


def _reward(entry: GivenReward) -> str:
    reward, named = entry.reward, entry.name or entry.role
    if reward.function is not None:
        function = reward.function
        place = PurePath(function.file).name if function.file else function.module or f"ConfigMap {function.config_map}"
        return f"{named}: function {function.name} of {place}"
    if reward.model is not None:
        path = reward.model.path
        return f"{named}: model {path if is_hub_id(path) else PurePath(path).name}"
    return f"{named}: {reward.kind}"


def _shown(text: str) -> str:
    """Escape text for a Markdown table cell."""
    return " ".join(text.split()).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")
