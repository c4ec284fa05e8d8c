"""Rows derived from the generated definition: rules, enum values and defaults, with manifests to accept and to refuse.

Also run against a real API server, so this module does not import pytest. Rule: the test subjects are found in the
definition, so that a new field, value or rule without a row fails a test. Only what the definition does not show is
written by hand: fields that a value requires, and another valid value of a fixed field.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from tests.support import algorithms
from tests.support.manifests.manifest_cases import changed_data

from rlhf_api import crd
from rlhf_api.algorithms import ALGORITHMS, without
from rlhf_api.algorithms.mismatch import LIMITS
from rlhf_api.job.lora import EVERY_TARGET
from rlhf_api.structural_schema import with_defaults
from rlhf_common.names import Group

Json = dict[str, Any]

SCHEMA: Final[Json] = crd.definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]

ALL: Final[Json] = {
    "spec.runPolicy.failurePolicy.rules": [
        {"name": "codes", "action": "Restart", "groups": ["generation"], "onExitCodes": {"values": [3]}},
        {"name": "conditions", "action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]},
        {"name": "words", "action": "Ignore", "onPodFailure": {"reasons": ["Evicted"], "message": "EmptyDir"}},
    ],
    "spec.generation.speculation": {"drafters": ["Model"], "draftModel": {"path": "/models/draft"}},
    "spec.training.lora": {"rank": 8},
    "spec.trackers": {
        "wandb": {"project": "tiny"},
        "mlflow": {"uri": "http://mlflow:5000"},
        "openTelemetry": {"endpoint": "http://otel-collector:4317"},
    },
}
"""Values that the examples omit and that fields are within."""
ENDPOINT: Final[Json] = {"spec.models.reward": {"endpoint": {"url": "http://rewards:8000"}}}
"""Another reward than that of the examples."""
JUDGE: Final[Json] = {"spec.models.reward": {"judge": {"endpoint": {"url": "http://judge:8000", "model": "judge"}}}}
"""A judge instead of the reward of the examples."""
COSTS: Final[Json] = {"spec.models.cost": {"function": {"file": "cost.py"}}}
"""Fields that an algorithm with a limit on costs needs."""
SEVERAL: Final[Json] = {
    "spec.models.rewards": [
        {"name": "called", "endpoint": {"url": "http://rewards:8000"}},
        {"name": "computed", "function": {"file": "reward.py"}},
        {"name": "asked", "judge": {"endpoint": {"url": "http://judge:8000", "model": "judge"}}},
    ],
}
"""Several rewards instead of that of the examples."""
EVALUATED: Final[Json] = {
    "spec.evaluation": {"samplesPerPrompt": 2, "temperature": 1.0, "prompts": {"path": "/data/held-out.jsonl"}},
}
"""An evaluation, which not every algorithm and not every reward has."""
_SOURCES: Final[list[Json]] = [
    {"name": "code", "path": "/data/code.jsonl"},
    {"name": "math", "path": "/data/math.parquet", "weight": 3, "promptKey": "question"},
]
MIXED: Final[Json] = {"spec.prompts.sources": _SOURCES}
"""Several sources of prompts instead of the file of the examples."""
MIXED_EVALUATION: Final[Json] = {"spec.evaluation": {"prompts": {"sources": _SOURCES}}}
"""An evaluation with several sources."""
TURNS: Final[Json] = {
    "spec.rollout.environment": {"file": "game.py"},
    "spec.rollout.stop": [],
}
"""An environment that answers the policy's turns, which not every algorithm has."""
DIVIDED: Final[Json] = {
    "spec.devices": {"count": 64, "fixed": ["Placement", "Generation", "Inference", "Training"]},
}
"""A number of devices, with all sizes as written."""
STREAMED: Final[Json] = {
    "spec.algorithm.ppo": None,
    "spec.algorithm.grpo": {"groupSize": 8, "miniBatchSize": 512},
    "spec.training.parallelism": {"data": 2},
}
"""An algorithm and a layout that stream gradients, instead of those of the examples."""
SHOWN: Final = "ppo"
"""Algorithm of the example that rows are made from."""
BESIDE: Final[dict[tuple[str, str], Json]] = {
    ("spec.rollout.cutBy", "Counts"): {"spec.rollout.oversample": 4},
    ("spec.rollout.longRounds", "Enabled"): {"spec.rollout.oversample": 4, "spec.rollout.cutBy": "Counts"},
    ("spec.rollout.longRounds", "Auto"): {"spec.deterministic": False},
    ("spec.rollout.keepCut", "Drafts"): {
        "spec.rollout.longRounds": "Auto",
        "spec.deterministic": False,
        "spec.generation.speculation.mode": "Auto",
        "spec.generation.speculation.drafters": ["Siblings", "Model"],
    },
    ("spec.generation.speculation.ahead", "Auto"): {
        "spec.generation.speculation.drafters": ["Siblings", "Model"],
    },
    ("spec.training.sharedPrompts", "Auto"): {"spec.training.packing": True},
    ("spec.training.sharedPrompts", "Enabled"): {"spec.training.packing": True},
    ("spec.training.stream", "Enabled"): STREAMED,
    ("spec.training.parallelism.sequenceParallel", "Enabled"): {
        "spec.training.backend": "megatron",
        "spec.training.parallelism.tensor": 2,
        "spec.training.lora": None,
    },
    ("spec.fusion.interStage.mode", "Fixed"): {
        "spec.fusion.interStage.threshold": 8,
        "spec.fusion.interStage.pool": 1,
    },
    **{
        (f"spec.algorithm.{algorithm}.klEstimator", "Unbiased"): {f"spec.algorithm.{algorithm}.klIn": "Loss"}
        for algorithm, fields in ALGORITHMS.items()
        if "kl_in" in fields.model_fields
    },
    **{
        ("spec.generation.speculation.drafters[]", drafter): {
            "spec.generation.speculation.drafters": ["Ngram", "Model"],
        }
        for drafter in ("Siblings", "Ngram")
    },
    ("spec.training.backend", "megatron"): {"spec.training.lora": None},
    ("spec.training.lora.trunk", "Shared"): {
        "spec.training.lora.publish": "Adapters",
        "spec.models.critic.path": "/models/policy",
    },
    **{
        ("spec.training.lora.targetModules[]", target): {"spec.training.lora.targetModules": ["q_proj"]}
        for target in (*EVERY_TARGET, "Nonesuch")
    },
    **{
        (f"spec.algorithm.{name}.mismatchCorrection.mode", mode): {
            f"spec.algorithm.{name}.oldLogProbabilities": "Trainer"
        }
        for name in ALGORITHMS
        for mode in LIMITS
    },
}
"""(field, value) -> fields that must be set with it, or with None be omitted."""
STATUS: Final[Json] = {
    "conditions": [
        {
            "type": "Running",
            "status": "True",
            "reason": "Running",
            "message": "",
            "lastTransitionTime": "2026-08-22T10:00:00Z",
        }
    ],
    "groups": [{"name": "generation", "desired": 1, "ready": 1}],
    "migrationPool": {"replicas": 1, "generationReplicas": 4, "threshold": 30, "summary": "1/4"},
    "restarts": {},
}
"""A status with every part that has fields with defaults or enums."""

FIXED: Final[dict[str, tuple[Json, list[str]]]] = {
    "spec.checkpoints": ({}, ["spec.checkpoints"]),
    "spec.algorithm": ({"spec.algorithm.ppo.clipRange": 0.3}, []),
    "spec.seed": ({"spec.seed": 8}, []),
    "spec.deterministic": ({"spec.deterministic": True}, []),
    "spec.placement": ({"spec.placement": "Colocated"}, []),
    "spec.devices": (DIVIDED, []),
    "spec.models": ({"spec.models.actor.path": "/other"}, []),
    "spec.rewardShaping": ({"spec.rewardShaping.scale": 2.0}, []),
    "spec.prompts": ({"spec.prompts.promptKey": "question"}, []),
    "spec.rollout": ({"spec.rollout.stop": ["END"]}, []),
    "spec.evaluation": ({"spec.evaluation.every": 5}, []),
    "spec.trackers": ({"spec.trackers.wandb.mode": "Offline"}, []),
    "spec.generation.engine": ({"spec.generation.engine": "vllm"}, []),
    "spec.generation.gpusPerReplica": ({"spec.generation.gpusPerReplica": 0}, []),
    "spec.generation.cpuThreads": ({"spec.generation.cpuThreads": 2}, []),
    "spec.generation.parallelism": (
        {
            "spec.generation.parallelism.tensor": 2,
            "spec.generation.engine": "vllm",
            "spec.generation.gpusPerReplica": 2,
        },
        [],
    ),
    "spec.inference.gpusPerReplica": ({"spec.inference.gpusPerReplica": 0}, []),
    "spec.inference.cpuThreads": ({"spec.inference.cpuThreads": 2}, []),
    "spec.training.backend": ({"spec.training.backend": "megatron", "spec.training.lora": None}, []),
    "spec.training.gpusPerReplica": ({"spec.training.gpusPerReplica": 0}, []),
    "spec.training.cpuThreads": ({"spec.training.cpuThreads": 2}, []),
    "spec.training.parallelism": ({"spec.training.parallelism": {"pipeline": 2}}, []),
    "spec.training.ranksPerPod": ({"spec.training.parallelism": {"pipeline": 2}, "spec.training.ranksPerPod": 2}, []),
    "spec.training.microBatchSize": ({"spec.training.microBatchSize": 4}, []),
    "spec.training.microBatchTokens": ({"spec.training.microBatchTokens": 4096}, []),
    "spec.training.packing": ({"spec.training.packing": True}, []),
    "spec.training.sharedPrompts": ({"spec.training.packing": True, "spec.training.sharedPrompts": "Enabled"}, []),
    "spec.training.stream": ({**STREAMED, "spec.training.stream": "Enabled"}, []),
    "spec.training.optimizer": ({"spec.training.optimizer.learningRate": 0.1}, []),
    "spec.training.lora": ({"spec.training.lora": {"rank": 4}}, []),
    "spec.training.precision": ({"spec.training.precision": "Float32"}, []),
    "spec.checkpoints.path": ({"spec.checkpoints.path": "/other"}, []),
    "spec.scheduling.gang.mode": ({"spec.scheduling.gang.mode": "Disabled"}, []),
    "spec.managedBy": ({"spec.managedBy": "kueue.x-k8s.io/multikueue"}, []),
    "spec.operatorClass": ({"spec.operatorClass": "other"}, []),
}
"""Field that is fixed in a live job -> another valid value of it: (set, unset)."""

WRONG: Final[Json] = {
    "integer": "7",
    "number": "0.5",
    "boolean": "true",
    "string": 7,
    "object": "text",
    "array": "text",
}
"""Type of a field -> a value of another type."""


@dataclass(frozen=True)
class Field:
    """A node of the definition; `path` has `[]` for the members of a list."""

    path: str
    node: Json

    @property
    def in_status(self) -> bool:
        """Return whether it is written through the status subresource."""
        return self.path.startswith("status")


def nodes(node: Json = SCHEMA, path: str = "") -> Iterator[Field]:
    """Yield every node of the definition."""
    yield Field(path, node)
    for name, child in node.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}" if path else name)
    if "items" in node:
        yield from nodes(node["items"], f"{path}[]")


ENUMS: Final = [node for node in nodes() if "enum" in node.node]
DEFAULTS: Final = [node for node in nodes() if "default" in node.node]
RULES: Final[list[tuple[str, Json]]] = [
    (node.path, rule)
    for node in nodes()
    for rule in node.node.get("x-kubernetes-validations", [])
    if "oldSelf" not in rule["rule"] or "optionalOldSelf" in rule
]
"""(node, validation) of every rule for any job or any new job."""
TRANSITIONS: Final[dict[str, str]] = {
    f"{node.path}{rule.get('fieldPath', '')}": rule["message"]
    for node in nodes()
    for rule in node.node.get("x-kubernetes-validations", [])
    if "oldSelf" in rule["rule"] and "optionalOldSelf" not in rule
}
"""Field to blame -> message, of every rule for a live job."""


def whole(path: str) -> Json:
    """Return a valid manifest with the parents of a field."""
    several = path.startswith(("spec.models.rewards", "spec.rewardShaping"))
    if path.startswith("spec.evaluation"):
        return _example(SHOWN, MIXED_EVALUATION if ".sources" in path else EVALUATED)
    more = JUDGE if ".reward.judge" in path else SEVERAL if several else ENDPOINT if ".reward.endpoint" in path else {}
    if path.startswith("spec.prompts.sources"):
        more = MIXED
    if path.startswith("spec.rollout.environment"):
        more = TURNS
    if path.startswith("spec.devices"):
        more = DIVIDED
    if path.startswith("spec.models.cost."):
        of_reward = whole(path.replace(".cost.", ".reward."))["spec"]["models"]["reward"]
        more = {"spec.models.cost": of_reward}
    algorithm = next((name for name in ALGORITHMS if path.startswith(f"spec.algorithm.{name}.")), SHOWN)
    return _example(algorithm, more)


def _example(algorithm: str, more: Json) -> Json:
    """Return an example with another algorithm, and with the values that the examples omit."""
    chosen: Json = {} if algorithm == SHOWN else {"spec.algorithm": algorithms.member(algorithm)}
    if len(algorithms.judges(algorithms.member(algorithm), {})) > 1:
        chosen |= COSTS
    absent = tuple(f"spec.{group}" for group in (Group.GENERATION, Group.INFERENCE) if algorithm in without(group))
    unset = ["spec.models.reward"] if absent or SEVERAL.keys() <= more.keys() else []
    if MIXED.keys() <= more.keys():
        unset.append("spec.prompts.path")
    values = {field: value for field, value in {**ALL, **more}.items() if not field.startswith(absent or "-")}
    if absent:
        values.pop("spec.models.reward", None)
    return changed_data(SHOWN, {**chosen, **values}, [*unset, *absent])


def placed(data: Json, path: str, value: Any) -> str:
    """Set a value at a path with `[]`, in the first member that has the next name, or remove it with None; return its
    path.
    """
    node: Any = data
    names = path.split(".")
    where = []
    for position, part in enumerate(names):
        name, listed = part.removesuffix("[]"), part.endswith("[]")
        last = position == len(names) - 1
        if not listed:
            where.append(name)
            if last and value is None:
                node.pop(name, None)
            elif last:
                node[name] = value
            else:
                node = node.setdefault(name, {})
            continue
        members = node[name]
        following = "" if last else names[position + 1].removesuffix("[]")
        index = next((at for at, each in enumerate(members) if not last and following in each), 0)
        where.append(f"{name}[{index}]")
        if last:
            members[index] = value
        else:
            node = members[index]
    return ".".join(where)


def with_value(field: Field, value: Any) -> tuple[Json, str]:
    """Return (manifest or status with a value in a field, path of the value)."""
    if field.in_status:
        data = {"status": copy.deepcopy(STATUS)}
        return data, placed(data, field.path, value)
    data = whole(field.path)
    for path, beside in BESIDE.get((field.path, str(value)), {}).items():
        placed(data, path, beside)
    return data, placed(data, field.path, value)


def bare() -> list[Json]:
    """Return valid manifests without fields that have a default, and the same with the parents of such fields."""
    result = []
    examples = [_example(algorithm, {} if algorithm == SHOWN else ENDPOINT) for algorithm in ALGORITHMS]
    for data in (
        *examples,
        _example(SHOWN, SEVERAL),
        _example(SHOWN, MIXED),
        _example(SHOWN, MIXED_EVALUATION),
        _example(SHOWN, JUDGE),
        _example(SHOWN, EVALUATED),
        _example(SHOWN, TURNS),
        _example(SHOWN, DIVIDED),
        whole("spec.models.cost.endpoint"),
        whole("spec.models.cost.judge"),
    ):
        result += [_without(data, SCHEMA, keep=False), _without(data, SCHEMA, keep=True)]
    return result


def _without(value: Any, schema: Json, *, keep: bool) -> Any:
    if isinstance(value, list) and "items" in schema:
        return [_without(item, schema["items"], keep=keep) for item in value]
    if not isinstance(value, dict):
        return value
    properties = schema.get("properties", {})
    around = {name for name, each in value.items() if keep and each and isinstance(each, dict | list)}
    return {
        name: _without(each, properties.get(name, {}), keep=keep)
        for name, each in value.items()
        if "default" not in properties.get(name, {}) or name in around
    }


def values_at(data: Any, path: str) -> list[Any]:
    """Return every value at a path with `[]`; empty if a field on the way is not set."""
    result = [data]
    for part in path.split("."):
        name, listed = part.removesuffix("[]"), part.endswith("[]")
        result = [item[name] for item in result if item is not None and name in item]
        if listed:
            result = [member for item in result for member in item]
    return result


def filled_in(field: Field, stored: list[Json]) -> bool:
    """Return whether objects that were written as `bare` came back with the default of a field."""
    result = [value for data in stored for value in values_at(data, field.path)]
    wanted = with_defaults(field.node["default"], field.node)
    # The parents of other fields are omitted in one object and present in the next.
    return wanted in result and (isinstance(wanted, dict | list) or all(item == wanted for item in result))


def others() -> list[tuple[Field, Any]]:
    """Return another valid value for every field with a default that may change in a live job."""
    result: list[tuple[Field, Any]] = []
    for field in DEFAULTS:
        node, default = field.node, field.node["default"]
        if field.in_status or field.path.startswith(tuple(FIXED.keys() - {"spec.checkpoints"})):
            continue
        if "enum" in node:
            result.append((field, next(item for item in node["enum"] if item != default)))
        elif node["type"] == "boolean":
            result.append((field, not default))
        elif node["type"] == "integer":
            result.append((field, default + 1 if default < node.get("maximum", default + 1) else default - 1))
        elif field.path.endswith(".template"):
            result.append((field, {"metadata": {"labels": {"a": "b"}}}))
    return result
