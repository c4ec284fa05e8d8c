"""What the end of a pod means: the job's own rules in their order, then the built-in ones; the first that matches wins.

Rule: pure. An exit code is looked at only of a container that ended by itself: what kills a disrupted or deleted pod
says nothing about the job, and would be seen or not depending on when one looks. Requests (a worker's 75 and 0, the
coordinator's 130) never come here, as they are no failures.
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
    ExitCode.ADDRESS_IN_USE: FinishedReason.ERROR,
    ExitCode.SAMPLE_FAILED: FinishedReason.SAMPLE,
}
"""Exit codes with which the coordinator ends the job: no restart changes them."""
INCURABLE: Final = frozenset({ExitCode.USER_CODE, ExitCode.BAD_MODEL, ExitCode.BAD_DATA, ExitCode.STORAGE})
"""The same of a worker; a wrong setting or a taken port of one worker may be cured by another pod."""
REMEDIES: Final[Mapping[int, str]] = {
    ExitCode.USAGE: "correct what it names",
    ExitCode.USER_CODE: "correct spec.models.reward, and what it calls",
    ExitCode.BAD_MODEL: "correct spec.models, or the folder it names",
    ExitCode.BAD_DATA: "correct the file that spec.prompts.path names",
    ExitCode.SAMPLE_FAILED: "correct or remove its line of the prompts, or allow some by spec.rollout.maxFailedSamples",
    ExitCode.STORAGE: "make the volume under spec.checkpoints.path writable, free or enlarge it",
}
"""What to do about an exit code that no restart cures."""


@dataclass(frozen=True)
class PolicyMatch:
    """What follows from an end."""

    action: str
    """Ignore, Restart or FailJob."""
    scope: str = "Pod"
    """Pod, Group or Job: what is restarted."""
    rule: str = ""
    """The job's rule that matched; empty for a built-in one."""
    reason: FinishedReason = FinishedReason.POLICY
    """FailJob: the reason of the condition Failed."""
    remedy: str = ""

    @property
    def by(self) -> str:
        """Return ` (rule x of spec.runPolicy.failurePolicy)`, or nothing."""
        return f" (rule {self.rule} of {POLICY})" if self.rule else ""


def of_disruption(rules: Sequence[FailureRule], pod: ObservedPod) -> PolicyMatch:
    """Return the match of a pod that was preempted, drained, refused by its node or lost with it, or deleted by
    somebody else.
    """
    said = pod.disruption, pod.disruption_message
    matching = (rule for rule in _about(rules, pod) if _has_condition(rule, pod) or _is_said(rule, *said))
    return next((_policy_match(rule) for rule in matching), PolicyMatch("Ignore"))


def of_lost(rules: Sequence[FailureRule], pod: ObservedPod, *, alone: bool) -> PolicyMatch:
    """Return the match of a pod whose process the coordinator has lost, `alone` or together with another that is
    counted.
    """
    matching = (rule for rule in _about(rules, pod) if _has_condition(rule, pod))
    return next((_policy_match(rule) for rule in matching), PolicyMatch("Restart" if alone else "Ignore"))


def of_end(rules: Sequence[FailureRule], pod: ObservedPod) -> PolicyMatch:
    """Return the match of a pod or container that ended by itself, and badly."""
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
