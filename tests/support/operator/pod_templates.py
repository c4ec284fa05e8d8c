"""Jobs with a pod template in one group, and the pods created from them."""

from typing import Any

import yaml

from rlhf_api.job import RLHFJob
from rlhf_operator.manifests import Images, render

MANIFEST = """
apiVersion: rlhf.dev/v1alpha1
kind: RLHFJob
metadata: {name: merged}
spec:
  algorithm: {grpo: {}}
  models: {actor: {path: /models/policy}, reward: {function: {module: rewards}}}
  prompts: {path: /models/prompts.jsonl}
"""


def job_with(template: dict[str, Any], group: str = "generation") -> RLHFJob:
    document = yaml.safe_load(MANIFEST)
    document["spec"][group] = {"template": template}
    return RLHFJob.model_validate(document)


def pods(job: RLHFJob) -> dict[str, dict[str, Any]]:
    return {pod["metadata"]["name"]: pod for pod in render(job, {}, Images()).pods}


def generation(template: dict[str, Any]) -> dict[str, Any]:
    return pods(job_with(template))["merged-generation-0"]


def worker(**fields: Any) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "worker", **fields}]}}


def spec(**fields: Any) -> dict[str, Any]:
    return {"spec": fields}
