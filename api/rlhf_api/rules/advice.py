"""Warnings: valid settings without effect, or with another effect than they seem, each with its field.

CEL cannot warn, so these do not come from the API server.
"""

from collections.abc import Iterator, Sequence
from typing import Final

from rlhf_api.algorithms import same_prompt_samples
from rlhf_api.job import RLHFJob
from rlhf_api.job.failure import FailureRule
from rlhf_api.problems import Problem, Severity
from rlhf_api.rules.beyond_cel import warnings
from rlhf_common.names import ExitCode, Group

_RULES: Final = "spec.runPolicy.failurePolicy.rules"
_CODES: Final = frozenset(range(1, 256)) - {int(ExitCode.RESTART)}
"""Possible exit codes of a failure."""

Match = tuple[str, object]
"""A group, and an exit code or a pod condition in it."""


def advice(job: RLHFJob) -> list[Problem]:
    """Return the warnings about a valid job."""
    idle = (
        *_warm_up(job),
        *_trained_for_nobody(job),
        *_unequal_rounds(job),
        *_unshared(job),
        *_unreachable(job.spec.run_policy.failure_policy.rules),
    )
    listed = [Problem(field, value, message, severity=Severity.WARNING) for field, value, message in idle]
    return [*listed, *warnings(job)]


def optimizer_steps(job: RLHFJob) -> int:
    """Return the optimizer steps in the whole job of a model that every iteration trains."""
    spec = job.spec
    fields = spec.algorithm.fields
    return spec.iterations * fields.epochs * (spec.rollout.batch_size // fields.mini_batch_size)


def _warm_up(job: RLHFJob) -> Iterator[tuple[str, object, str]]:
    warm_up, steps = job.spec.training.optimizer.warmup_steps, optimizer_steps(job)
    if warm_up >= steps:
        message = f"the job has {steps} optimizer steps, so the learning rate never leaves its warm-up: use fewer"
        yield "spec.training.optimizer.warmupSteps", warm_up, message


def _trained_for_nobody(job: RLHFJob) -> Iterator[tuple[str, object, str]]:
    speculation = job.spec.generation.speculation
    draft = speculation.draft_model
    if draft is not None and draft.train == "Enabled" and speculation.mode == "Disabled":
        message = "trains a draft model that no worker uses while spec.generation.speculation.mode is Disabled"
        yield "spec.generation.speculation.draftModel.train", draft.train, message


def _unequal_rounds(job: RLHFJob) -> Iterator[tuple[str, object, str]]:
    """Yield warnings about a loss or whitening that depends on the other samples of a batch, where batches have unlike
    lengths."""
    rollout, fields = job.spec.rollout, job.spec.algorithm.fields
    if rollout.long_rounds != "Disabled":
        cause = "spec.rollout.longRounds"
    elif job.spec.prompts.length_window > 1:
        cause = "spec.prompts.lengthWindow"
    else:
        return
    below = f"spec.algorithm.{job.spec.algorithm.name}"
    if getattr(fields, "loss_aggregation", "") == "TokenMean":
        message = (
            f"weighs a token by all tokens of its batch, so with {cause} tokens of long responses count less: use "
            "SequenceMean or ConstantLength"
        )
        yield f"{below}.lossAggregation", "TokenMean", message
    if fields.whitens_batch:
        message = (
            f"whitens advantages over a batch, so with {cause} those of short and long responses are whitened "
            "separately: let it not whiten them, or use an algorithm with advantages by group"
        )
        yield f"{below}.whitenAdvantages" if hasattr(fields, "whiten_advantages") else below, True, message


def _unshared(job: RLHFJob) -> Iterator[tuple[str, object, str]]:
    """Yield a warning for sharedPrompts Enabled if a mini-batch has on average fewer than two responses to a prompt."""
    mode, same = job.spec.training.shared_prompts, same_prompt_samples(job.spec)
    if mode == "Enabled" and same < 2:
        message = (
            f"shares little, because a mini-batch has {same:.1f} responses to a prompt on average: raise "
            "miniBatchSize, or use Auto"
        )
        yield "spec.training.sharedPrompts", mode, message


def _unreachable(rules: Sequence[FailureRule]) -> Iterator[tuple[str, object, str]]:
    taken: set[Match] = set()
    for index, rule in enumerate(rules):
        if rule.on_exit_codes is None and rule.on_pod_conditions is None:
            continue
        matches = set(_matches(rule))
        if matches and matches <= taken:
            message = "never applies, because earlier rules match the same failures: move it up, or remove it"
            yield f"{_RULES}[{index}]", rule.name, message
        elif not matches:
            yield f"{_RULES}[{index}]", rule.name, "matches no exit code: use other values, or remove it"
        taken |= matches


def _matches(rule: FailureRule) -> Iterator[Match]:
    ends: set[object] = {(condition.type, condition.status) for condition in rule.on_pod_conditions or ()}
    if rule.on_exit_codes is not None:
        named = set(rule.on_exit_codes.values)
        ends |= _CODES & named if rule.on_exit_codes.operator == "In" else _CODES - named
    for group in rule.groups or list(Group):
        yield from ((str(group), end) for end in ends)
