"""The model card, README.md of a folder on a hub: what the model was trained from, on, by and to which numbers.

Rule: pure. Of a path only its last name is shown, of an endpoint or a judge only that there was one: whoever reads the
card is not whoever ran the job. A number that the run did not write down is left out.
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
"""What a hub says that a model is for."""
_NUMBERS: Final = (
    ("reward_first", "reward, mean over the first tenth of the iterations"),
    ("reward_last", "reward, mean over the last tenth"),
    ("loss", "loss of the last iteration"),
    ("samples", "samples"),
    ("seconds", "seconds"),
)
"""Facts of a run's summary that a card shows, and their words."""


@dataclass(frozen=True)
class ExportedModel:
    """What a card is about."""

    job: RLHFJob
    role: ModelRole
    version: int
    """Weight version: iterations it was trained for."""
    adapters: bool
    """Whether the folder holds adapters over a base model, and not a whole model."""
    summary: Mapping[str, Any] = field(default_factory=dict)
    """Of the run; empty when it has not ended."""
    evaluation_reward: float | None = None
    """Of this version, where it was the best one evaluated."""
    exported_by: str = ""
    """Version of this project."""


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
        ("rewards", ", ".join(_reward(given) for given in spec.models.all_rewards) or "none"),
        ("prompts", _shown(", ".join(PurePath(file.path).name for file in spec.prompts.files))),
        ("seed", f"{spec.seed}{' (deterministic)' if spec.deterministic else ''}"),
        ("learning rate", f"{spec.training.optimizer.peak_learning_rate(model.role):g}"),
        ("trained weights", "low-rank adapters" if model.adapters else "all, saved as float32"),
    ]
    if model.evaluation_reward is not None:
        rows.append(("evaluation reward of this version, the best of the run", f"{model.evaluation_reward:.4g}"))
    # Of the whole run: true of the version that it ended with alone.
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
    """Return the generation settings of a policy whose folder has none: responses are sampled as in its training.

    `config` is the model's config.json, of which the ids of special tokens are taken.
    """
    rollout = job.spec.rollout
    sampled = rollout.temperature > 0
    settings: dict[str, Any] = {"do_sample": sampled, "max_new_tokens": rollout.max_response_tokens}
    if sampled:
        settings |= {"temperature": rollout.temperature, "top_p": rollout.top_p, "top_k": rollout.top_k}
    ids = {name: config.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return settings | {name: value for name, value in ids.items() if value is not None}


def is_hub_id(source: str) -> bool:
    """Return whether a model's source is `owner/name` on a hub, and no path of a machine."""
    parts = source.split("/")
    return len(parts) == 2 and all(part and part[0] not in ".~" for part in parts)


def _reward(given: GivenReward) -> str:
    reward, named = given.reward, given.name or given.role
    if reward.function is not None:
        function = reward.function
        place = PurePath(function.file).name if function.file else function.module or f"ConfigMap {function.config_map}"
        return f"{named}: function {function.name} of {place}"
    if reward.model is not None:
        path = reward.model.path
        return f"{named}: model {path if is_hub_id(path) else PurePath(path).name}"
    return f"{named}: {reward.kind}"


def _shown(text: str) -> str:
    """What ends no row of a table and is no markup."""
    return " ".join(text.split()).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")
