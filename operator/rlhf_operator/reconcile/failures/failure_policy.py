"""Matches the end of a pod with the failure policy: the job's own rules in order, then the built-in ones.

Rule: pure; the first match wins.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rlhf_api import user_patterns
from rlhf_api.job.failure import FailureRule
from rlhf_common.conditions import FinishedReason
from rlhf_common.names import ExitCode, Group
from rlhf_operator.reconcile.observed.observed_pod import ObservedPod

POLICY: Final = "spec.runPolicy.failurePolicy"
VERDICTS: Final[Mapping[int, FinishedReason]] = {
    ExitCode.USAGE: FinishedReason.INVALID,
    ExitCode.USER_CODE: FinishedReason.USER_CODE,
    ExitCode.BAD_MODEL: FinishedReason.BAD_MODEL,
    ExitCode.BAD_DATA: FinishedReason.BAD_DATA,
    ExitCode.STORAGE: FinishedReason.STORAGE,
    ExitCode.ADDRESS_IN_USE: FinishedReason.ADDRESS_IN_USE,
    ExitCode.SAMPLE_FAILED: FinishedReason.SAMPLE,
}
"""Exit codes of the coordinator that fail the job by the built-in rules, because no restart would help."""
INCURABLE: Final = frozenset({ExitCode.USER_CODE, ExitCode.BAD_MODEL, ExitCode.BAD_DATA, ExitCode.STORAGE})
"""Exit codes of a worker that fail the job by the built-in rules, because no restart would help."""
REMEDIES: Final[Mapping[int, str]] = {
    ExitCode.USAGE: "correct what it names",
    ExitCode.USER_CODE: "correct spec.models.reward, and what it calls",
    ExitCode.BAD_MODEL: "correct spec.models, or the folder it names",
    ExitCode.BAD_DATA: "correct the file that spec.prompts.path names",
    ExitCode.SAMPLE_FAILED: "correct or remove its line of the prompts, or allow some by spec.rollout.maxFailedSamples",
    ExitCode.STORAGE: "make the volume under spec.checkpoints.path writable, free or enlarge it",
}
"""Exit code -> remedy, for codes in VERDICTS that have one."""


@dataclass(frozen=True)
class PolicyMatch:
    """The consequence of an end."""

    action: str
    """Ignore, Restart or FailJob; empty for an end that was requested."""
    scope: str = "Pod"
    """Scope of the restart: Pod, Group or Job."""
    rule: str = ""
    """Name of the job's rule that matched; empty for a built-in one."""
    reason: FinishedReason = FinishedReason.POLICY
    """Reason of the condition Failed, for FailJob."""
    remedy: str = ""

    @property
    def by(self) -> str:
        """Return ` (rule x of spec.runPolicy.failurePolicy)`, or an empty text."""
        return f" (rule {self.rule} of {POLICY})" if self.rule else ""


def of_disruption(rules: Sequence[FailureRule], pod: ObservedPod) -> PolicyMatch:
    """Return the match of a pod that was preempted, drained, refused by its node, lost, or deleted by others."""
    said = pod.disruption, pod.disruption_message
    matching = (rule for rule in _about(rules, pod) if _has_condition(rule, pod) or _is_said(rule, *said))
    return next((_policy_match(rule) for rule in matching), PolicyMatch("Ignore"))


def of_lost(rules: Sequence[FailureRule], pod: ObservedPod, *, alone: bool) -> PolicyMatch:
    """Return the match of a pod whose process the coordinator has lost. `alone`: it is the first of such pods."""
    matching = (rule for rule in _about(rules, pod) if _has_condition(rule, pod))
    return next((_policy_match(rule) for rule in matching), PolicyMatch("Restart" if alone else "Ignore"))


def of_end(rules: Sequence[FailureRule], pod: ObservedPod) -> PolicyMatch:
    """Return the match of a pod or container that ended by itself, without having been asked to."""
    assert pod.end is not None
    code, said = pod.end.code, (pod.end.reason, pod.end.message)
    for rule in _about(rules, pod):
        if _has_exit_code(rule, code) or _has_condition(rule, pod) or _is_said(rule, *said):
            return _policy_match(rule)
    if code is not None:
        final = code in VERDICTS if pod.group == Group.COORDINATOR else code in INCURABLE
        if final:
            return PolicyMatch("FailJob", reason=VERDICTS[code], remedy=REMEDIES.get(code, ""))
    return PolicyMatch("Restart")


def _about(rules: Sequence[FailureRule], pod: ObservedPod) -> Iterable[FailureRule]:
    return (rule for rule in rules if rule.groups is None or pod.group in rule.groups)


def _has_exit_code(rule: FailureRule, code: int | None) -> bool:
    wanted = rule.on_exit_codes
    return wanted is not None and code is not None and (code in wanted.values) == (wanted.operator == "In")


def _has_condition(rule: FailureRule, pod: ObservedPod) -> bool:
    patterns = rule.on_pod_conditions or []
    return any((pattern.type, pattern.status) in pod.conditions for pattern in patterns)


def _is_said(rule: FailureRule, reason: str, message: str) -> bool:
    wanted = rule.on_pod_failure
    if wanted is None or not (reason or message):
        return False
    named = wanted.reasons is None or reason in wanted.reasons
    return named and (wanted.message is None or user_patterns.pattern_found(wanted.message, message))


def _policy_match(rule: FailureRule) -> PolicyMatch:
    return PolicyMatch(rule.action, rule.scope, rule.name)
