"""The files that a job's pods read: the resolved job (ConfigMap) and the job's certificates (Secret).

Must never put the authority's key into the Secret.
"""

import base64
import json
from collections.abc import Mapping
from typing import Any

from rlhf_api.job import RLHFJob
from rlhf_operator.manifests import identity, user_code_mounts
from rlhf_operator.manifests.mount_paths import JOB_KEY, REWARD_KEY


def document(job: RLHFJob) -> dict[str, Any]:
    """Return the resolved job as JSON; a null that disables a feature stays a null.

    Code in a user's ConfigMap is replaced by the path of its mounted file.
    """
    written: dict[str, Any] = job.model_dump(mode="json", by_alias=True, exclude={"status"})
    metadata_fields = ("name", "namespace", "uid", "labels", "annotations")
    models = written["spec"]["models"]
    several = {each["name"]: each for each in models["rewards"] or ()}
    for entry, _ in user_code_mounts.config_maps(job.spec.models):
        file = f"{user_code_mounts.mount_path(entry)}/{REWARD_KEY}"
        reward = several[entry.name] if entry.name else models[entry.role.manifest_name]
        reward["function"].update(configMap=None, file=file)
    if file := user_code_mounts.environment_file(job.spec.rollout.environment):
        written["spec"]["rollout"]["environment"].update(configMap=None, file=file)
    written["metadata"] = {key: job.metadata[key] for key in metadata_fields if key in job.metadata}
    return written


def configuration(job: RLHFJob, data: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the ConfigMap with `data`, or with the current job if that is empty."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": identity.metadata(job, identity.configuration_name(job), identity.labels(job)),
        "data": dict(data) if data else {JOB_KEY: text_of(document(job))},
    }


def text_of(written: Mapping[str, Any]) -> str:
    """Return a document as the text in the ConfigMap."""
    return json.dumps(written, indent=2)


def secret(job: RLHFJob, certificates: Mapping[str, bytes]) -> dict[str, Any]:
    """Return the Secret with the certificates of the job's processes; `certificates` is `Certificates.data()`."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "kubernetes.io/tls",
        "metadata": identity.metadata(job, identity.certificates_name(job), identity.labels(job)),
        "data": {name: base64.b64encode(content).decode() for name, content in sorted(certificates.items())},
    }
