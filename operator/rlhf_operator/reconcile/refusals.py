"""Explains why the API server refuses objects of a job, with a remedy if one is known. Rule: pure."""

import re
from collections.abc import Mapping
from typing import Final

from rlhf_api.job import RLHFJob
from rlhf_operator.manifests import identity

SHOWN: Final = 3
"""Most kinds of causes that are shown."""
_KINDS: Final[Mapping[str, str]] = {
    "exceeded quota": "free quota in the namespace, or raise it",
    "failed quota: .*must specify": "give the containers that it names these resources in {template}, or let a "
    "LimitRange of namespace {namespace} give defaults",
    "insufficient quota to": "create a ResourceQuota in namespace {namespace} that covers this",
    "status unknown for quota": "the quota is new: it takes effect in a moment",
    "no PriorityClass with name": "create it (kubectl get priorityclass lists them), or correct {priority}",
    "integer value of priority": "remove priority from {template}",
    " usage per [A-Za-z]+ is | limit to request ratio per ": "give resources in {template} that the LimitRange of the "
    "namespace allows",
    "error looking up service account": "create it in namespace {namespace}, or correct serviceAccountName in "
    "{template}",
    "does not reference that (secret|imagePullSecret)": "add it to that service account, or take it out of {template}",
    'RuntimeClass "[^"]*" not found': "create it (kubectl get runtimeclass lists them), or correct "
    "runtimeClassName in {template}",
    "Overhead doesn't match|Overhead set without": "remove overhead from {template}",
    "scheduling.nodeSelector|node label selector": "correct nodeSelector in {template}",
    "pod tolerations .*conflict": "correct the tolerations in {template}",
    "violates PodSecurity": "take what it names out of {template}, or lower the Pod Security level of the namespace",
    "security context constraint": "let the service account of {template} use a SecurityContextConstraints that "
    "allows this",
    "because it is being terminated": "the namespace is being deleted: create the job in another namespace",
    'namespaces "[^"]*" not found': "create namespace {namespace}, or the job in another namespace",
    'User "[^"]*" cannot ': "give the operator this right: upgrade its chart, or correct its roles",
    "ValidatingAdmissionPolicy '": "change what it names in {template}, or ask the owner of that policy",
    'admission webhook "[^"]*" denied': "change what it names in {template}, or ask the owner of that webhook",
}
"""Pattern of an API server's message -> remedy; the first match counts."""


def refusal_messages(job: RLHFJob, refusals: Mapping[str, str]) -> list[str]:
    """Return a sentence for each of the first SHOWN kinds of causes. `refusals`: object name -> why it was refused."""
    causes: dict[str, list[str]] = {}
    for name in sorted(refusals):
        causes.setdefault(remedy_of(job, refusals[name]) or same_words(name, refusals[name]), []).append(name)
    messages = []
    for names in list(causes.values())[:SHOWN]:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        messages.append(f"{names[0]}{more} cannot be created: {with_remedy(job, refusals[names[0]])}")
    return messages


def with_remedy(job: RLHFJob, words: str) -> str:
    """Return the API server's message with a remedy, if one is known."""
    remedy = remedy_of(job, words)
    return f"{words}: {remedy}" if remedy else words


def remedy_of(job: RLHFJob, words: str) -> str:
    """Return the remedy for a refusal; empty if none is known."""
    remedy = next((remedy for pattern, remedy in _KINDS.items() if re.search(pattern, words)), "")
    template = "the pod template"
    named = job.spec.scheduling.priority_class_name
    ours = bool(named) and f" {named} " in words
    priority = "spec.scheduling.priorityClassName" if ours else f"priorityClassName in {template}"
    return remedy.format(namespace=identity.namespace(job), priority=priority, template=template)


def same_words(name: str, words: str) -> str:
    """Return the message without the name of the object, to compare it with other messages."""
    return words.replace(name, "")
