"""Loads the scorer of a task of the graph, from the manifest's source.

Rule: an unusable source is a WorkError before the first sample.
"""

from typing import Any, TypeAlias

import torch

from rlhf_api.algorithms import ModelKind, ModelRole, Task
from rlhf_api.job import RLHFJobSpec
from rlhf_api.job.model_source import ModelSource
from rlhf_common.model_files.vocabularies import MISMATCH, tokenizer_problem
from rlhf_common.names import ExitCode
from rlhf_workers.failures import WorkError
from rlhf_workers.inference.group_comparisons import GroupScorer
from rlhf_workers.inference.model_scorer import LogProbabilityScorer, ModelScorer, ValueScorer, scoring_attention
from rlhf_workers.inference.rewards.registry import load_reward
from rlhf_workers.inference.rewards.reward_calls import RewardCalls
from rlhf_workers.models import loading as models
from rlhf_workers.models.precision import compute_dtype

Scorer: TypeAlias = ModelScorer | GroupScorer | RewardCalls


Trunks = dict[str, Any]
"""Frozen models on this worker by folder; several scorers may share one."""


def load_scorer(
    task: Task, spec: RLHFJobSpec, device: torch.device, *, offloaded: bool = False, trunks: Trunks | None = None
) -> Scorer:
    """Return the scorer of a task; `offloaded` leaves its model in host memory.

    Frozen policies, and critics that share a trunk, use the models in `trunks` and add to them.
    """
    model, trunks = task.model, {} if trunks is None else trunks
    home = torch.device("cpu") if offloaded else device
    if model.kind is not ModelKind.REWARD:
        _require_policys_tokens(model, spec)
    if model.kind is ModelKind.POLICY:
        return _log_probabilities(model, spec, device, home, trunks)
    if model.kind is ModelKind.VALUE:
        return _values(model, spec, device, home, trunks)
    return load_reward(task, spec, device, home)


def _log_probabilities(
    model: ModelRole, spec: RLHFJobSpec, device: torch.device, home: torch.device, trunks: Trunks
) -> Scorer:
    trunk = _trunk(_source(model, spec), spec.models.path_field(model), spec, home, trunks)
    return LogProbabilityScorer(trunk, spec.rollout.temperature, device, blocks=spec.deterministic)


def _values(model: ModelRole, spec: RLHFJobSpec, device: torch.device, home: torch.device, trunks: Trunks) -> Scorer:
    source, field = _source(model, spec), spec.models.path_field(model)
    settings = spec.training.adapters(model)
    if settings is not None and settings.trunk == "Shared":
        trunk = _trunk(source, field, spec, home, trunks)
        loaded = models.value_model_over(trunk, settings, source.path, field=field)
    else:
        dtype, attention = compute_dtype(spec), scoring_attention(spec)
        loaded = models.load_backbone_with_value_head(
            source.path, field=field, dtype=dtype, device=home, attention=attention
        )
    return ValueScorer(loaded, device, blocks=spec.deterministic)


def _trunk(source: ModelSource, field: str, spec: RLHFJobSpec, home: torch.device, trunks: Trunks) -> Any:
    """Return the causal language model of a folder; it is loaded once."""
    if source.path not in trunks:
        dtype, attention = compute_dtype(spec), scoring_attention(spec)
        trunks[source.path] = models.load_causal_lm(
            source.path, field=field, dtype=dtype, device=home, attention=attention
        )
    return trunks[source.path]


def _require_policys_tokens(model: ModelRole, spec: RLHFJobSpec) -> None:
    """Raise WorkError TokenizerMismatch if a model's tokens differ from the policy's."""
    actor, own, field = spec.models.actor.path, _source(model, spec).path, spec.models.path_field(model)
    if own == actor:
        return
    folders = models.model_folder(own, field), models.model_folder(actor, "spec.models.actor.path")
    problem = tokenizer_problem(*folders, lambda folder: models.load_tokenizer(str(folder), field).get_vocab())
    if problem:
        raise WorkError(MISMATCH, f"{field}: {own}: {problem}", field=field, exit_code=ExitCode.BAD_MODEL)


def _source(model: ModelRole, spec: RLHFJobSpec) -> ModelSource:
    source = spec.models.source(model)
    assert source is not None  # only a reward may have no model
    return source
