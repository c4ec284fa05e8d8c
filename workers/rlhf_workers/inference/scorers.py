"""Which scorer a model role of the graph gets, loaded from where the manifest says.

Rule: everything that can be wrong with a folder, a function or an address is found here, before the first sample, as a
WorkError that names the field.
"""

from typing import TypeAlias

import torch

from rlhf_api.algorithms import ModelKind, ModelRole
from rlhf_api.job import RLHFJobSpec
from rlhf_api.job.models import ModelSource
from rlhf_workers import models
from rlhf_workers.inference.model_scorer import LogProbabilityScorer, ModelScorer, ValueScorer, scoring_attention
from rlhf_workers.inference.rewards.registry import load_reward
from rlhf_workers.inference.rewards.reward_calls import RewardCalls
from rlhf_workers.precision import compute_dtype

Scorer: TypeAlias = ModelScorer | RewardCalls


def load_scorer(model: ModelRole, spec: RLHFJobSpec, device: torch.device, *, offloaded: bool = False) -> Scorer:
    """Return the scorer of a model role; `offloaded` leaves its model in host memory."""
    home = torch.device("cpu") if offloaded else device
    if model.kind is ModelKind.POLICY:
        return _log_probabilities(model, spec, device, home)
    if model.kind is ModelKind.VALUE:
        return _values(model, spec, device, home)
    return load_reward(spec, device, home)


def _log_probabilities(model: ModelRole, spec: RLHFJobSpec, device: torch.device, home: torch.device) -> Scorer:
    source, field = _source(model, spec), spec.models.path_field(model)
    dtype, attention = compute_dtype(spec), scoring_attention(spec)
    loaded = models.load_causal_lm(source.path, field=field, dtype=dtype, device=home, attention=attention)
    return LogProbabilityScorer(loaded, spec.rollout.temperature, device, blocks=spec.deterministic)


def _values(model: ModelRole, spec: RLHFJobSpec, device: torch.device, home: torch.device) -> Scorer:
    source, field = _source(model, spec), spec.models.path_field(model)
    dtype, attention = compute_dtype(spec), scoring_attention(spec)
    loaded = models.load_backbone_with_value_head(
        source.path, field=field, dtype=dtype, device=home, attention=attention
    )
    return ValueScorer(loaded, device, blocks=spec.deterministic)


def _source(model: ModelRole, spec: RLHFJobSpec) -> ModelSource:
    source = spec.models.source(model)
    assert source is not None  # only what judges responses may be no model
    return source
