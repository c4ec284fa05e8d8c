"""Which scorer a model role of the graph gets, loaded from where the manifest says.

Rule: everything that can be wrong with a folder, a function or an address is found here, before the first sample, as a
WorkError that names the field.
"""

import os
from typing import TypeAlias

import torch

from rlhf_api.algorithms import ModelKind, ModelRole
from rlhf_api.job import RLHFJobSpec
from rlhf_api.job.models import ModelSource
from rlhf_workers import models
from rlhf_workers.inference.model_scorer import LogProbabilityScorer, ModelScorer, ValueScorer
from rlhf_workers.inference.rewards.function import FunctionReward
from rlhf_workers.inference.rewards.model import RewardModelScorer
from rlhf_workers.inference.rewards.model_text import OwnTokenizer, differs
from rlhf_workers.inference.rewards.reward_calls import RewardCalls
from rlhf_workers.inference.rewards.reward_settings import given
from rlhf_workers.inference.rewards.reward_source import FUNCTION_FIELD, HEADERS_FIELD, RewardSource
from rlhf_workers.precision import compute_dtype

Scorer: TypeAlias = ModelScorer | RewardCalls


def load_scorer(model: ModelRole, spec: RLHFJobSpec, device: torch.device, *, offloaded: bool = False) -> Scorer:
    """Return the scorer of a model role; `offloaded` leaves its model in host memory."""
    home = torch.device("cpu") if offloaded else device
    if model.kind is ModelKind.POLICY:
        return _log_probabilities(model, spec, device, home)
    if model.kind is ModelKind.VALUE:
        return _values(model, spec, device, home)
    return _reward(spec, device, home)


def _attention(spec: RLHFJobSpec) -> models.Attention:
    return "eager" if spec.deterministic else "sdpa"


def _log_probabilities(model: ModelRole, spec: RLHFJobSpec, device: torch.device, home: torch.device) -> Scorer:
    source, field = _source(model, spec), spec.models.path_field(model)
    dtype, attention = compute_dtype(spec), _attention(spec)
    loaded = models.load_causal_lm(source.path, field=field, dtype=dtype, device=home, attention=attention)
    return LogProbabilityScorer(loaded, spec.rollout.temperature, device, blocks=spec.deterministic)


def _values(model: ModelRole, spec: RLHFJobSpec, device: torch.device, home: torch.device) -> Scorer:
    source, field = _source(model, spec), spec.models.path_field(model)
    dtype, attention = compute_dtype(spec), _attention(spec)
    loaded = models.load_backbone_with_value_head(
        source.path, field=field, dtype=dtype, device=home, attention=attention
    )
    return ValueScorer(loaded, device, blocks=spec.deterministic)


def _source(model: ModelRole, spec: RLHFJobSpec) -> ModelSource:
    source = spec.models.source(model)
    assert source is not None  # only what judges responses may be no model
    return source


def _reward(spec: RLHFJobSpec, device: torch.device, home: torch.device) -> Scorer:
    reward = spec.models.reward
    if reward.model is not None:
        return _reward_model(spec, reward.model.path, device, home)
    calls = RewardCalls(_reward_source(spec))
    calls.start()
    return calls


def _reward_source(spec: RLHFJobSpec) -> RewardSource:
    reward = spec.models.reward
    if reward.function is not None:
        env = given(reward.function.env, f"{FUNCTION_FIELD}.env", reward, os.environ)
        return FunctionReward(reward.function, reward.timeout_seconds, spec.inference.cpu_threads, given=env)
    assert reward.endpoint is not None
    # Only a job with an endpoint pays for loading an HTTP client.
    from rlhf_workers.inference.rewards.endpoint import EndpointReward

    found = given(reward.endpoint.headers, HEADERS_FIELD, reward, os.environ)
    return EndpointReward(reward.endpoint, reward.timeout_seconds, found)


def _reward_model(spec: RLHFJobSpec, path: str, device: torch.device, home: torch.device) -> Scorer:
    field = "spec.models.reward.model.path"
    dtype, attention = compute_dtype(spec), _attention(spec)
    model = models.load_sequence_classifier(path, field=field, dtype=dtype, device=home, attention=attention)
    policy = models.load_tokenizer(spec.models.actor.path, "spec.models.actor.path")
    tokenizer = models.load_tokenizer(path, field)
    own = OwnTokenizer(tokenizer, spec.prompts, field) if differs(tokenizer, policy) else None
    return RewardModelScorer(model, own, device)
