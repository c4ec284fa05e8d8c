"""The table of all rules with CEL, and the fields that may not change in a live job."""

from collections.abc import Iterator
from typing import Final

from rlhf_api.algorithms import ALGORITHMS, full_graph
from rlhf_api.job import RLHFJobSpec
from rlhf_api.rules.absent_groups import of_absent_groups
from rlhf_api.rules.common_rules import (
    multiple,
    nothing_to_fuse,
    number_of_ranks,
    ranks_in_cel,
    ranks_in_words,
)
from rlhf_api.rules.context import of_context
from rlhf_api.rules.critic_overlap import of_critic_overlap
from rlhf_api.rules.environment import of_environment
from rlhf_api.rules.evaluation import of_evaluation
from rlhf_api.rules.experts import of_experts
from rlhf_api.rules.failure import of_failure_policy
from rlhf_api.rules.gradient_streaming import streaming_rules
from rlhf_api.rules.length_window import of_length_window
from rlhf_api.rules.lora import of_lora
from rlhf_api.rules.parallelism import of_parallelism
from rlhf_api.rules.paths import of_paths
from rlhf_api.rules.placement import of_placement
from rlhf_api.rules.prompts import of_prompts
from rlhf_api.rules.rank_pods import of_rank_pods
from rlhf_api.rules.reward import of_reward
from rlhf_api.rules.rewards import of_rewards
from rlhf_api.rules.rollout import of_cut_prompts, of_sampling
from rlhf_api.rules.rollout_overlap import of_rollout_overlap
from rlhf_api.rules.rule import Rule, Values
from rlhf_api.rules.sharding import of_sharding
from rlhf_api.rules.speculation import of_speculation
from rlhf_api.rules.tensor import of_tensor
from rlhf_api.rules.unions import unions
from rlhf_common.names import Group, worker_name

MAX_WORKERS: Final = 4096
"""Maximum workers of one group: four digits in host names."""
HOST_NAME: Final = 63
"""Maximum characters of a DNS label."""
MAX_NAME: Final = HOST_NAME - len(f"-{worker_name(Group.GENERATION, MAX_WORKERS - 1)}")
"""Maximum characters of a job name: `<job>-generation-4095` is the longest host name made from it."""


COORDINATOR_ENDING: Final = f"-{Group.COORDINATOR.value}"
"""Suffix of a coordinator's Service name, which the name of a new job may not have."""


def _of_algorithms() -> Iterator[Rule]:
    """Yield the rules that follow from each algorithm's graph, batch sizes and own rules."""
    for algorithm, fields in ALGORITHMS.items():
        path = f"spec.algorithm.{algorithm}"
        mini_batch = f"{path}.miniBatchSize"
        yield multiple("spec.rollout.batchSize", mini_batch, of=path)
        yield multiple(mini_batch, "spec.training.microBatchSize", "spec.training.parallelism.data", of=path)
        if len(full_graph(algorithm).trained) < 2:
            yield nothing_to_fuse(algorithm)
        yield from fields.shared_rules(path)
        yield from fields.rules(path)


def _given_when_fixed(name: str, example: str) -> Iterator[Rule]:
    """Yield the rules of an inter-stage fusion field that is set exactly with mode Fixed."""
    field, mode = f"spec.fusion.interStage.{name}", "spec.fusion.interStage.mode"

    def needed(values: Values) -> bool:
        return values[mode] != "Fixed" or values.has(field)

    def read(values: Values) -> bool:
        return not values.has(field) or values[mode] == "Fixed"

    yield Rule(
        field=mode,
        node="spec",
        cel=f"self.fusion.interStage.mode != 'Fixed' || has(self.fusion.interStage.{name})",
        holds=needed,
        message=f"needs {field} when it is Fixed: set it, for example to {example}, or use Auto",
    )
    yield Rule(
        field=field,
        node="spec",
        cel=f"!has(self.fusion.interStage.{name}) || self.fusion.interStage.mode == 'Fixed'",
        holds=read,
        message=f"is read only with {mode}: Fixed: set that, or remove it",
    )


def _only_with(name: str, mode: str) -> Rule:
    """Return the rule of a gang field that only one scheduler reads."""
    field, chosen = f"spec.scheduling.gang.{name}", "spec.scheduling.gang.mode"
    return Rule(
        field=field,
        node="spec",
        cel=f"!has(self.scheduling.gang.{name}) || self.scheduling.gang.mode == '{mode}'",
        holds=lambda values: not values.has(field) or values[chosen] == mode,
        message=f"is read only with {chosen}: {mode}: set that, or remove it",
    )


_NAME_FORM: Final = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"


def _is_host_name(name: str) -> bool:
    letters = set("abcdefghijklmnopqrstuvwxyz")
    return bool(name) and name[0] in letters and set(name) <= letters | set("0123456789-") and name[-1] != "-"


_NAME_RULES: Final = (
    Rule(
        field="metadata.name",
        node="",
        cel=f"size(self.metadata.name) <= {MAX_NAME}",
        holds=lambda values: len(values["metadata.name"]) <= MAX_NAME,
        message=(
            f"must be at most {MAX_NAME} characters, so that the longest host name made from it, "
            f"<name>-{worker_name(Group.GENERATION, MAX_WORKERS - 1)}, stays within {HOST_NAME}"
        ),
    ),
    Rule(
        field="metadata.name",
        node="",
        cel=f"self.metadata.name.matches('{_NAME_FORM}')",
        holds=lambda values: _is_host_name(values["metadata.name"]),
        message="must be lower case letters, digits and '-', starting with a letter, not ending in '-', such as job-1",
    ),
    Rule(
        field="metadata.name",
        node="",
        # New jobs only: a stored job with such a name must stay writable, at least for its status.
        cel=f"oldSelf.hasValue() || !self.metadata.name.endsWith('{COORDINATOR_ENDING}')",
        holds=lambda values: values.has("metadata.uid") or not values["metadata.name"].endswith(COORDINATOR_ENDING),
        message=(
            f"must not end in {COORDINATOR_ENDING}: the coordinator of another job may need the Service of this name: "
            "use another ending, such as -job"
        ),
    ),
)

_STATEMENTS: Final = (
    Rule(
        field="spec.deterministic",
        node="spec",
        cel="!self.deterministic || self.generation.engine != 'vllm' || self.generation.gpusPerReplica > 0",
        holds=lambda values: (
            not values["spec.deterministic"]
            or values["spec.generation.engine"] != "vllm"
            or values["spec.generation.gpusPerReplica"] > 0
        ),
        message=(
            "must be false with engine vllm on CPU, whose kernels sum in an order that depends on the batch: use "
            "engine torch, or give generation workers GPUs"
        ),
    ),
    *_given_when_fixed("threshold", "a fifth of spec.rollout.batchSize"),
    *_given_when_fixed("pool", "1"),
    Rule(
        field="spec.fusion.interStage.threshold",
        node="spec",
        cel="!has(self.fusion.interStage.threshold) || self.fusion.interStage.threshold <= self.rollout.batchSize",
        holds=lambda values: (
            not values.has("spec.fusion.interStage.threshold")
            or values["spec.fusion.interStage.threshold"] <= values["spec.rollout.batchSize"]
        ),
        message="must be at most spec.rollout.batchSize, the samples of an iteration",
    ),
    Rule(
        field="spec.training.gpusPerReplica",
        node="spec",
        cel="self.training.gpusPerReplica <= 1",
        holds=lambda values: values["spec.training.gpusPerReplica"] <= 1,
        message="must be 0 or 1, one process per GPU: use 1 and more spec.training.parallelism",
    ),
    Rule(
        field="spec.training.parallelism",
        node="spec.training.parallelism",
        cel=f"{ranks_in_cel('self')} <= {MAX_WORKERS}",
        holds=lambda values: number_of_ranks(values) <= MAX_WORKERS,
        message=f"{ranks_in_words()}, the number of ranks, must be at most {MAX_WORKERS}: use fewer of any",
    ),
    Rule(
        field="spec.training.schedule.mode",
        node="spec",
        cel="self.training.schedule.mode != 'OneFOneB' || self.fusion.intraStage.mode in ['Disabled', 'Auto']",
        holds=lambda values: (
            values["spec.training.schedule.mode"] != "OneFOneB"
            or values["spec.fusion.intraStage.mode"] in ("Disabled", "Auto")
        ),
        message="must be Auto when spec.fusion.intraStage.mode asks for a fused schedule, as OneFOneB is serial",
    ),
    Rule(
        field="spec.training.microBatchTokens",
        node="spec",
        cel="!has(self.training.microBatchTokens) || self.fusion.intraStage.mode in ['Disabled', 'Auto']",
        holds=lambda values: (
            not values.has("spec.training.microBatchTokens")
            or values["spec.fusion.intraStage.mode"] in ("Disabled", "Auto")
        ),
        message="is for serial schedules, as a fused one has a fixed number of micro-batches: remove it, or set "
        "spec.fusion.intraStage.mode to Disabled",
    ),
    Rule(
        field="spec.training.packing",
        node="spec",
        cel="!self.training.packing || self.training.backend == 'torch'",
        holds=lambda values: not values["spec.training.packing"] or values["spec.training.backend"] == "torch",
        message="needs backend torch",
    ),
    Rule(
        field="spec.training.sharedPrompts",
        node="spec",
        cel="self.training.sharedPrompts == 'Disabled' || self.training.packing && "
        "self.training.parallelism.context == 1",
        holds=lambda values: (
            values["spec.training.sharedPrompts"] == "Disabled"
            or (values["spec.training.packing"] and values["spec.training.parallelism.context"] == 1)
        ),
        message="needs packing true and parallelism.context 1: set those, or use Disabled",
    ),
)

_FORCED: Final = Rule(
    field="spec.runPolicy.forceCoordinatorAfterSeconds",
    node="spec",
    cel="!has(self.runPolicy.forceCoordinatorAfterSeconds) || has(self.checkpoints)",
    holds=lambda values: (
        not values.has("spec.runPolicy.forceCoordinatorAfterSeconds") or values.has("spec.checkpoints")
    ),
    message="needs spec.checkpoints: without it the journal, which a new coordinator continues, is lost with the pod",
)

RULES: Final[tuple[Rule, ...]] = (
    *unions(RLHFJobSpec, "spec"),
    *_of_algorithms(),
    *of_cut_prompts(),
    *_NAME_RULES,
    *of_sampling(),
    *_STATEMENTS,
    _only_with("queue", "Volcano"),
    _only_with("timeoutSeconds", "Coscheduling"),
    *of_parallelism(),
    *of_paths(),
    _FORCED,
    *of_critic_overlap(),
    *of_rollout_overlap(),
    *streaming_rules(),
    *of_placement(),
    *of_failure_policy(),
    *of_reward(),
    *of_rewards(),
    *of_speculation(),
    *of_lora(),
    *of_sharding(),
    *of_tensor(),
    *of_context(),
    *of_experts(),
    *of_rank_pods(),
    *of_evaluation(),
    *of_environment(),
    *of_prompts(),
    *of_length_window(),
    *of_absent_groups(),
)
"""All rules with CEL."""

IMMUTABLE: Final[tuple[str, ...]] = (
    "spec.algorithm",
    "spec.seed",
    "spec.deterministic",
    "spec.placement",
    "spec.devices",
    "spec.models",
    "spec.rewardShaping",
    "spec.prompts",
    "spec.evaluation",
    "spec.rollout",
    "spec.generation.engine",
    "spec.generation.gpusPerReplica",
    "spec.generation.cpuThreads",
    "spec.generation.parallelism",
    "spec.inference.gpusPerReplica",
    "spec.inference.cpuThreads",
    "spec.training.backend",
    "spec.training.gpusPerReplica",
    "spec.training.cpuThreads",
    "spec.training.parallelism",
    "spec.training.ranksPerPod",
    "spec.training.microBatchSize",
    "spec.training.microBatchTokens",
    "spec.training.packing",
    "spec.training.sharedPrompts",
    "spec.training.stream",
    "spec.training.optimizer",
    "spec.training.lora",
    "spec.training.precision",
    "spec.checkpoints.path",
    "spec.scheduling.gang.mode",
    "spec.trackers",
    "spec.managedBy",
    "spec.operatorClass",
)
"""Fields that may not change in an existing job, except those of `LAYOUT` while it is suspended."""

LAYOUT: Final[tuple[str, ...]] = (
    "spec.devices",
    "spec.training.backend",
    "spec.training.parallelism",
    "spec.training.ranksPerPod",
    "spec.training.microBatchSize",
    "spec.training.microBatchTokens",
    "spec.training.packing",
    "spec.training.sharedPrompts",
    "spec.training.stream",
)
"""The immutable fields of how processes share the work. They may change while a job is suspended or all processes of a
run have ended."""

IMMUTABLE_MESSAGE: Final = "cannot be changed in an existing job: set it back, or create a new job"
LAYOUT_MESSAGE: Final = "can be changed in a suspended job only: set it back, or suspend it"
