"""Real jobs in layouts of two training ranks: they complete, and a kill of each rank changes no weight."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import transformers
from safetensors import safe_open
from tests.support.jobs.chaos import Ended, Kills, assert_same_weights, killed_beside_undisturbed, run_job
from tests.support.jobs.local_job import write_job

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

HOST_BYTES = "training/train/host_optimizer_bytes"
LARGEST = "training/train/largest_micro_batch_tokens"
MEGATRON = "training.backend=megatron"
PARTS = "training.parallelism.pipeline=1"
TWO = (PARTS, "training.parallelism.data=2")


def nothing_more(killed: Ended, undisturbed: Ended, manifest: Path) -> None:
    """Check nothing beside the weights."""


def moments_are_in_host_memory(killed: Ended, undisturbed: Ended, manifest: Path) -> None:
    host_bytes = [line[HOST_BYTES] for line in killed.lines]
    assert len(host_bytes) == 3
    assert host_bytes[0] == host_bytes[1] == host_bytes[2] > 0
    assert not any(HOST_BYTES in line for line in undisturbed.lines)


def at_most_40_tokens(killed: Ended, undisturbed: Ended, manifest: Path) -> None:
    assert all(line[LARGEST] <= 40 for line in undisturbed.lines)


def at_most_80_tokens_without_padding(killed: Ended, undisturbed: Ended, manifest: Path) -> None:
    assert {line["training/train/padding"] for line in undisturbed.lines} == {0.0}
    assert all(line[LARGEST] <= 80 for line in undisturbed.lines)


def learns_as_one_rank_with_whole_samples(killed: Ended, undisturbed: Ended, manifest: Path) -> None:
    settings = ("training.parallelism={pipeline: 1, data: 1}", "training.packing=true")
    whole = run_job(manifest, manifest.parent / "whole", settings=settings)
    assert len(undisturbed.lines) == len(whole.lines) == 3
    for name in ("training/gradient_norm/actor", "training/actor/loss", "training/actor/entropy"):
        expected = pytest.approx(whole.lines[0][name], rel=1e-3, abs=1e-5)
        assert undisturbed.lines[0][name] == expected, "they begin with the same samples"


def every_expert_is_trained_and_saved(killed: Ended, undisturbed: Ended, manifest: Path) -> None:
    policy = manifest.parent / "policy"
    saved = max((killed.run_dir / "checkpoints").glob("iteration-*")) / "actor"
    assert names(saved) == names(policy)
    model = transformers.AutoModelForCausalLM.from_pretrained(saved)
    began = dict(transformers.AutoModelForCausalLM.from_pretrained(policy).named_parameters())
    still = [name for name, value in model.named_parameters() if value.equal(began[name])]
    assert still == [], "routers and experts are trained"


def names(folder: Path) -> set[str]:
    found = set[str]()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            found |= set(tensors.keys())
    return found


class KilledRankCase(NamedTuple):
    """One job of two ranks."""

    seed: int
    """Seed of the moments of kills."""
    job: dict[str, Any]
    """Arguments of `write_job`."""
    settings: tuple[str, ...]
    otherwise: tuple[str, ...] = ()
    """Settings of the killed run alone, which change no weight."""
    check: Callable[[Ended, Ended, Path], None] = nothing_more
    """More checks of the killed and the undisturbed run of the manifest."""


LONG, SHORT = {"iterations": 4, "every": 2}, {"iterations": 3, "every": 1}
FEW = SHORT | {"responses": 12}
SHARED = (*TWO, "training.parallelism.shardOptimizer=true")
EXPERTS = (*TWO, "training.parallelism.expert=2")
CASES = {
    "megatron": KilledRankCase(20, {"iterations": 6, "every": 2, "family": "llama"}, (MEGATRON,)),
    "megatron's experts": KilledRankCase(21, SHORT | {"family": "mixtral"}, (MEGATRON, *EXPERTS)),
    "sharded": KilledRankCase(21, LONG, (*TWO, "training.parallelism.shard=2")),
    "tensors": KilledRankCase(22, SHORT, (MEGATRON, PARTS, "training.parallelism.tensor=2")),
    "tensors of the actor, by position": KilledRankCase(
        22,
        SHORT,
        (MEGATRON, "training.parallelism={pipeline: 1, tensor: 2, criticTensor: 1, sequenceParallel: Enabled}"),
    ),
    "tensors of the critic": KilledRankCase(
        22, SHORT, (MEGATRON, "training.parallelism={pipeline: 2, tensor: 1, criticTensor: 2}")
    ),
    "shared moments": KilledRankCase(22, SHORT, SHARED),
    "moments in host memory": KilledRankCase(
        22, SHORT, SHARED, ("training.parallelism.offloadOptimizer=true",), moments_are_in_host_memory
    ),
    # Hidden states of different shapes pass between two stages; most mini-batches reach the limit.
    "micro-batches by tokens": KilledRankCase(
        22, LONG, ("training.parallelism.pipeline=2", "training.microBatchTokens=40"), check=at_most_40_tokens
    ),
    # Rows of different lengths pass between two stages, and more micro-batches if needed.
    "packed": KilledRankCase(
        27,
        LONG,
        ("training.packing=true", "training.microBatchTokens=80", "algorithm.ppo.oldLogProbabilities=Trainer"),
        check=at_most_80_tokens_without_padding,
    ),
    "samples by position": KilledRankCase(
        27,
        FEW,
        ("training.parallelism={pipeline: 1, data: 1, context: 2}", "training.packing=true"),
        check=learns_as_one_rank_with_whole_samples,
    ),
    "experts": KilledRankCase(23, FEW | {"family": "mixtral"}, EXPERTS, check=every_expert_is_trained_and_saved),
    "sharded experts": KilledRankCase(
        24,
        FEW | {"family": "qwen3_moe"},
        (*TWO, "training.parallelism.shard=2"),
        check=every_expert_is_trained_and_saved,
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_ranks_killed_once_go_on_from_a_checkpoint_to_the_same_weights(case: KilledRankCase, tmp_path: Path) -> None:
    manifest = write_job(tmp_path, **case.job)
    killed, undisturbed = killed_beside_undisturbed(
        manifest, tmp_path, case.settings, case.seed, otherwise=case.otherwise
    )
    case.check(killed, undisturbed, manifest)


def test_ranks_of_one_pod_and_their_launcher_are_killed_and_the_weights_are_those_of_a_pod_a_rank(
    tmp_path: Path,
) -> None:
    manifest = write_job(tmp_path, iterations=5, every=2)
    undisturbed = run_job(manifest, tmp_path / "undisturbed")
    victims = ("training-1", "training-pod-0", "training-0")
    kills = Kills(66, len(victims), victims, first=victims, longest_calm_seconds=0.5, iterations_between=1)
    killed = run_job(manifest, tmp_path / "killed", settings=("training.ranksPerPod=2",), kills=kills)
    assert_same_weights(killed, undisturbed)
    assert (
        "training-1 ended with signal 9 (killed, or out of memory), and the ranks of its pod with it" in killed.output
    )
