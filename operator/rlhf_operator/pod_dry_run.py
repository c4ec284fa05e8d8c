"""Asks the API server for a dry run of one pod of each template of which the job has no active pod.

An accepted template is remembered; a refused one is tried again later.
"""

import hashlib
import json
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from rlhf_api.job import RLHFJob
from rlhf_api.problems import Severity
from rlhf_common.names import Group
from rlhf_operator.api_client.client import KubernetesClient
from rlhf_operator.api_client.errors import ConflictError, InvalidError, RefusedError, UnavailableError
from rlhf_operator.manifests import Images, identity
from rlhf_operator.manifests.pod_problems import problems_of_pods
from rlhf_operator.manifests.rendering import pod
from rlhf_operator.reconcile import ObservedPod
from rlhf_operator.reconcile.parsed_job import parse_job
from rlhf_operator.reconcile.phases import DRY_RUN_RETRY_SECONDS
from rlhf_operator.reconcile.refusals import same_words, with_remedy

log = logging.getLogger(__name__)

Json = dict[str, Any]

REMEMBERED: Final = 4096
"""Accepted templates that are remembered, by a digest of 64 characters each."""
WORDS_MAX: Final = 600
"""Characters of the API server's message about one template that are shown."""
_NO_DRY_RUN: Final = "does not support dry run"
"""The API server's message if a webhook does not support dry runs; it says nothing about the pod."""
_SAMPLE: Final = {"name": "sample", "uid": "sample"}
"""Metadata in place of the job's own name and uid, so that pods of different jobs may be equal."""


@dataclass(frozen=True)
class _Verdict:
    job_version: tuple[str, int]
    """UID and generation of the job."""
    words: str
    until: float


class Trials:
    """Verdicts on the pods of all jobs."""

    def __init__(self, client: KubernetesClient, images: Images, clock: Callable[[], float] = time.monotonic) -> None:
        self._client, self._images, self._clock = client, images, clock
        self._verdicts: dict[str, _Verdict] = {}
        self._taken: OrderedDict[str, None] = OrderedDict()

    def forget(self, key: str) -> None:
        """Drop the verdict on a deleted job."""
        self._verdicts.pop(key, None)

    async def verdict(self, key: str, body: Json, pods: Mapping[str, ObservedPod]) -> str:
        """Return why the API server refuses pods of a stored job; empty if no refusal is known.

        Raises MissingError if the job's namespace is gone.
        """
        meta = body["metadata"]
        job_version = (str(meta["uid"]), int(meta.get("generation") or 0))
        cached = self._verdicts.get(key)
        if (
            cached is not None
            and cached.job_version == job_version
            and (not cached.words or self._clock() < cached.until)
        ):
            return cached.words
        admission = parse_job(body)
        if admission.job is None or not admission.planned:
            return ""
        created_templates = {(item.group, item.template_hash) for item in pods.values() if item.active}
        try:
            refused = {
                group: await self._refusal(admission.job, group)
                for group, mark in admission.template_hashes.items()
                if (group, mark) not in created_templates
            }
        except UnavailableError as error:
            log.warning("%s: pods cannot be tried now: %s", key, error, extra={"job": key})
            return ""
        words = _described(admission.job, {group: words for group, words in refused.items() if words})
        if words:
            log.warning("%s: %s", key, words, extra={"job": key})
        self._verdicts[key] = _Verdict(job_version, words, self._clock() + DRY_RUN_RETRY_SECONDS)
        return words

    async def _refusal(self, job: RLHFJob, group: Group) -> str:
        """Return the API server's message if it finds a template invalid, else an empty text.

        Raises UnavailableError or MissingError.
        """
        digest = self._digest(job, group)
        if digest in self._taken:
            self._taken.move_to_end(digest)
            return ""
        try:
            await self._client.try_to_create(pod(job, group, 0, self._images))
        except InvalidError as error:
            if _NO_DRY_RUN not in str(error):
                return str(error)
        except ConflictError:
            pass  # a pod of that name exists
        except RefusedError:
            return ""  # a quota or missing rights, reported when pods are created
        self._taken[digest] = None
        if len(self._taken) > REMEMBERED:
            self._taken.popitem(last=False)
        return ""

    def _digest(self, job: RLHFJob, group: Group) -> str:
        namespace = job.metadata.get("namespace", "")
        sample = job.model_copy(update={"metadata": {**_SAMPLE, "namespace": namespace}})
        text = json.dumps(pod(sample, group, 0, self._images), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def _described(job: RLHFJob, refused: Mapping[Group, str]) -> str:
    """Return a message for the refused templates; templates that are refused with the same message share one."""
    alike: dict[str, list[Group]] = {}
    for group, words in refused.items():
        alike.setdefault(same_words(identity.pod_name(job, group, 0), words), []).append(group)
    server_problems = [problem for problem in problems_of_pods(job) if problem.severity is Severity.SERVER]
    messages = []
    for groups in alike.values():
        words = refused[groups[0]]
        shown = words if len(words) <= WORDS_MAX else words[: WORDS_MAX - 1] + "…"
        paths = tuple(f"spec.{group}.template" for group in groups)
        messages.append(f"{', '.join(paths)}: the API server refuses its pods: {with_remedy(job, shown)}")
        messages += [str(problem) for problem in server_problems if problem.field.startswith(paths)][:3]
    return "; ".join(messages)
