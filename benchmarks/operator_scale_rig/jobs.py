"""The jobs of the scenarios, and the objects that the operator makes for each, made here without it."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from rlhf_operator.certificates import new_authority
from rlhf_operator.manifests import identity, render
from rlhf_operator.manifests.configuration import secret
from rlhf_operator.reconcile.parsed_job import parse_job

Json = dict[str, Any]
ROOT = Path(__file__).resolve().parents[2]
SMALL = {"requests": {"cpu": "10m", "memory": "16Mi"}}
TEMPLATE = {"spec": {"containers": [{"name": "worker", "resources": SMALL}]}}
"""Small resources, for many pods on few fake nodes."""
FILES = {"name": "files", "mountPath": "/checkpoints"}
RANKS = {
    "spec": {
        "containers": [{"name": "worker", "resources": SMALL, "volumeMounts": [FILES]}],
        "volumes": [{"name": "files", "csi": {"driver": "files.example.org"}}],
    }
}
"""Template with a volume for checkpoints, which no scheduler waits for and no fake node mounts."""
OTHERS = 3
"""Number of pods of a job besides generation: coordinator, one inference, one training."""
FEWEST_PODS = OTHERS + 1


def job(namespace: str, name: str, *, pods: int = FEWEST_PODS, suspend: bool = False) -> Json:
    """Return a PPO job of `pods` pods."""
    document: Json = yaml.safe_load((ROOT / "examples" / "ppo.yaml").read_text())
    document["metadata"] = {"name": name, "namespace": namespace}
    document["spec"] |= {
        "suspend": suspend,
        "runPolicy": {"backoffLimit": 100},
        "generation": {"replicas": pods - OTHERS, "template": TEMPLATE},
        "inference": {"replicas": 1, "template": TEMPLATE},
        "training": {"parallelism": {"pipeline": 1}, "microBatchSize": 8, "template": RANKS},
    }
    return document


def objects(stored: Json) -> list[Json]:
    """Return all objects that the operator makes for a stored job, including Secrets, in its order."""
    parsed = parse_job(stored).job
    assert parsed is not None
    authority = new_authority(parsed.name, datetime.now(UTC))
    issued = authority.issue([], datetime.now(UTC)).data()
    authority_secret = secret(parsed, {"ca.crt": authority.certificate, "ca.key": authority.key})
    authority_secret |= {"type": "Opaque"}
    authority_secret["metadata"] = identity.metadata(parsed, identity.authority_name(parsed), identity.labels(parsed))
    return [authority_secret, *render(parsed, issued).all]
