"""A device without memory for a phase is rejected before loading; unknown sizes are not rejected."""

from pathlib import Path

import pytest
from tests.support.coordinator.coordinated import make_job
from tests.support.manifests.header_job import write_header_job

from rlhf_common import control_pb2 as pb
from rlhf_common.names import ExitCode
from rlhf_coordinator.loop.device_memory_check import DeviceMemory
from rlhf_coordinator.scheduling.training_schedule import schedule_json
from rlhf_coordinator.state.job_state import job_context


def memory(folder: Path, placement: str = "Colocated") -> DeviceMemory:
    path = folder / "policy"
    job = make_job(folder, placement=placement, generation={"replicas": 2, "gpusPerReplica": 1})
    if not path.joinpath("model.safetensors").exists():
        path.joinpath("config.json").unlink()
        path.rmdir()
        write_header_job(folder, {})
    return DeviceMemory(job_context(job, schedule_json(job.spec)))


def on(device: str, size: int) -> pb.Register:
    return pb.Register(worker="generation-1", device=device, device_name="a card", device_memory_bytes=size)


def test_what_cannot_fit_is_refused_with_phase_and_numbers(tmp_path: Path) -> None:
    asked = memory(tmp_path)
    # 64 samples x 304 tokens x 128 values x 2 bytes of cache, and some kilobytes of weights.
    failure = asked.problem(on("cuda:0", 1_000_000), 1)
    assert failure is not None
    assert (failure.reason, failure.field, failure.exit_code) == ("DoesNotFit", "spec.placement", ExitCode.USAGE)
    start = "Colocated: generation-1 on a card: phase decoding and scoring needs 0."
    assert failure.message.startswith(start)
    assert "lower spec.generation.maxBatchSize" in failure.message
    assert asked.problem(on("cuda:0", 100_000_000), 1) is None


def test_a_rank_of_its_own_that_cannot_fit_is_told_which_layout_does(tmp_path: Path) -> None:
    asked = memory(tmp_path, "Dedicated")
    whole = asked.problem(on("cuda:0", 1), 0)
    assert whole is not None
    assert (whole.reason, whole.field, whole.exit_code) == (
        "DoesNotFit", "spec.training.parallelism", ExitCode.USAGE
    )  # fmt: skip
    assert whole.message.startswith("Dedicated: generation-1 on a card: a training rank needs ")
    assert "no layout of up to" in whole.message
    assert asked.problem(on("cuda:0", 100_000_000), 0) is None


@pytest.mark.parametrize(
    ("placement", "device", "size", "rank"),
    [("Dedicated", "cuda:0", 1, None), ("Colocated", "cpu", 1, 1), ("Colocated", "cuda:0", 0, 1)],
)
def test_only_devices_of_ranks_whose_size_is_known_are_judged(
    tmp_path: Path, placement: str, device: str, size: int, rank: int | None
) -> None:
    assert memory(tmp_path, placement).problem(on(device, size), rank) is None
