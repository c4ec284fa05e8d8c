"""The fields of a resolved job that processes of protocol 0 know, which are older than the protocol's number.

Such a process refuses a job with any other field, so a coordinator leaves those out of what it sends it. Later versions
ignore fields they do not know, so nothing is ever added here. The module is deleted with the release that drops
protocol 0.
"""

from functools import cache
from typing import Any, Final

from rlhf_api.structural_schema import pruned

_FIELDS: Final = """
spec: algorithm iterations seed deterministic placement suspend models prompts rollout generation inference training
  coordinator fusion checkpoints runPolicy scheduling managedBy
spec.algorithm: ppo grpo
spec.algorithm.ppo: klCoefficient clipRange clipRangeHigh entropyCoefficient epochs miniBatchSize klIn klTarget
  klHorizon valueClipRange gamma gaeLambda whitenAdvantages
spec.algorithm.grpo: klCoefficient clipRange clipRangeHigh entropyCoefficient epochs miniBatchSize groupSize
  advantageScale lossAggregation
spec.models: actor critic reference reward
spec.models.actor: path
spec.models.critic: path
spec.models.reference: path
spec.models.reward: function model endpoint timeoutSeconds retries
spec.models.reward.function: file module configMap name
spec.models.reward.model: path
spec.models.reward.endpoint: url
spec.prompts: path promptKey chatTemplate shuffle
spec.rollout: batchSize maxPromptTokens maxResponseTokens temperature topP topK stop stopTokenIds
spec.generation: gpusPerReplica cpuThreads template replicas engine engineArgs maxBatchSize parallelism speculation
spec.generation.parallelism: tensor
spec.generation.speculation: mode
spec.inference: gpusPerReplica cpuThreads template replicas overlap incremental batchTokens
spec.training: gpusPerReplica cpuThreads template backend parallelism schedule microBatchSize optimizer precision
  activationCheckpointing
spec.training.parallelism: pipeline data
spec.training.schedule: mode
spec.training.optimizer: learningRate criticLearningRate schedule warmupSteps beta1 beta2 epsilon weightDecay
  maxGradientNorm
spec.coordinator: template
spec.fusion: interStage intraStage
spec.fusion.interStage: mode threshold pool transfer balance
spec.fusion.intraStage: mode
spec.checkpoints: path every keep onDeletion deletionDeadlineSeconds
spec.runPolicy: backoffLimit failurePolicy activeDeadlineSeconds ttlSecondsAfterFinished workerTimeoutSeconds
  startTimeoutSeconds
spec.runPolicy.failurePolicy: rules
spec.runPolicy.failurePolicy.rules[]: name action scope groups onExitCodes onPodConditions
spec.runPolicy.failurePolicy.rules[].onExitCodes: operator values
spec.runPolicy.failurePolicy.rules[].onPodConditions[]: type status
spec.scheduling: gang priorityClassName
spec.scheduling.gang: mode queue timeoutSeconds
"""
"""A path, and what it holds; `[]` is an item of a list. What is not listed holds keys of the user, or is a value."""


def readable(spec: dict[str, Any]) -> dict[str, Any]:
    """Return a job's spec with the fields that protocol 0 knows, and without the one word that it does not: Fixed
    speculation changes no token, and Auto is what it is nearest to."""
    known: dict[str, Any] = pruned(spec, _schema())
    speculation = known.get("generation", {}).get("speculation", {})
    if speculation.get("mode") == "Fixed":
        speculation["mode"] = "Auto"
    return known


@cache
def _schema() -> dict[str, Any]:
    nodes: dict[str, dict[str, Any]] = {"spec": {}}
    for line in _FIELDS.replace("\n  ", " ").strip().splitlines():
        path, _, names = line.partition(": ")
        node = nodes[path]
        node["properties"] = {}
        for name in names.split():
            node["properties"][name] = nodes[f"{path}.{name}"] = {}
            items: dict[str, Any] = {}
            nodes[f"{path}.{name}[]"] = items
            nodes[f"{path}.{name}"]["items"] = items
    return nodes["spec"]
