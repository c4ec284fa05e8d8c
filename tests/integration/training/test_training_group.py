"""Four real training ranks (pipeline 2, data 2) over gloo: bitwise the results of threads, checkpoints, a killed rank.

One launcher imports the libraries and forks the ranks, which run once. The coordinator is a real gRPC server that has
only batches, and starts late on purpose.
"""

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.coordinator.partial_services import PartialCoordinator
from tests.support.loopback import free_address, free_port
from tests.support.model_folders import models
from tests.support.training.training_ranks import (
    ThreadCommunicator,
    exhaust,
    make_job,
    make_samples,
    on_ranks,
    serial,
    trainer_of,
)
from tests.support.training.training_roles import finish, train
from tests.support.workers.outbox import RecordedOutbox

from rlhf_api.algorithms import full_graph
from rlhf_api.algorithms.graph import SAMPLED_FIELD
from rlhf_api.job import RLHFJob
from rlhf_common import control_pb2 as pb
from rlhf_common import control_pb2_grpc
from rlhf_common.names import Env
from rlhf_workers.training.batches.training_batch import batch_from
from rlhf_workers.training.stages.pipeline_stage import HEADS_IN_FILES, VALUE_HEAD
from rlhf_workers.training.training_role import build

pytestmark = pytest.mark.timeout(600)

WORLD, ITERATIONS, WAIT = 4, 2, 240
FIELDS = (SAMPLED_FIELD, *full_graph("ppo").scored_fields)
ALGORITHM = {"ppo": {"miniBatchSize": 8, "epochs": 2, "klTarget": 2.0}}


class BatchServer(PartialCoordinator):
    """Serves the batch of any iteration, two samples per part."""

    def FetchBatch(self, request: pb.FetchBatchRequest, context: Any) -> Iterator[pb.BatchPart]:  # noqa: N802
        samples = make_samples(seed=request.iteration)
        for start in range(0, len(samples), 2):
            yield pb.BatchPart(samples=samples[start : start + 2], total=len(samples))


def rank_main(folder: Path, rank: int) -> None:
    """Run a training process without its agent: become a rank, train, save, then train until the group breaks."""
    torch.set_num_threads(1)
    job = RLHFJob.model_validate_json((folder / "job.json").read_text())
    become = pb.BecomeTraining(
        rank=rank,
        world_size=WORLD,
        rendezvous=os.environ[Env.RENDEZVOUS],
        group_epoch=1,
        schedule=serial(job, 2, 2).model_dump_json(),
    )
    role = build(job, pb.Command(id=1, become_training=become), torch.device("cpu"), None)
    for iteration in range(ITERATIONS):
        outbox = RecordedOutbox()
        role.handle(train(iteration), outbox)
        finish(role, outbox)
        metrics = dict(outbox.answers[0].train.metrics)
        for timing in ("train/seconds", "step_seconds", "bubble_seconds", "bubble_share", "transport"):
            del metrics[timing]
    outbox = RecordedOutbox()
    role.handle(pb.Command(id=9, save_checkpoint=pb.SaveCheckpoint(folder=str(folder / "saved"))), outbox)
    served = {f"{m}:{name}": value for m in ("actor", "critic") for name, value in role.tensors(m, ITERATIONS)}
    save_file({name: value.contiguous() for name, value in served.items()}, folder / f"served-{rank}.safetensors")
    files = [file.path for file in outbox.answers[0].checkpoint.files]
    (folder / f"report-{rank}.tmp").write_text(json.dumps({"metrics": metrics, "files": files}))
    (folder / f"report-{rank}.tmp").rename(folder / f"report-{rank}.json")
    for iteration in range(ITERATIONS, 100_000):
        outbox = RecordedOutbox()
        role.handle(train(iteration), outbox)
        finish(role, outbox)


def launch(folder: Path) -> None:
    """Fork the ranks before this process has a thread; print their pids, then their exit codes."""
    pids = []
    for rank in range(WORLD):
        pid = os.fork()
        if pid == 0:
            os.environ[Env.INDEX] = str(rank)
            try:
                rank_main(folder, rank)
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        pids.append(pid)
    print(json.dumps(pids), flush=True)
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]), flush=True)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RLHFJob]:
    folder = models.write_policy(tmp_path_factory.mktemp("models") / "qwen2", "qwen2", seed=1)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield make_job(folder, folder, algorithm=ALGORITHM)
    torch.set_num_threads(threads)


def start_ranks(folder: Path, coordinator: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.integration.training.test_training_group", str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            Env.COORDINATOR: f"127.0.0.1:{coordinator}",
            Env.GROUP: "training",
            Env.RENDEZVOUS: free_address(),
            "OMP_NUM_THREADS": "1",
        },
    )


def report_of(folder: Path, rank: int, launcher: subprocess.Popen[str]) -> dict[str, object]:
    """Return a rank's report after its iterations."""
    file, deadline = folder / f"report-{rank}.json", time.monotonic() + WAIT
    while not file.exists():
        assert time.monotonic() < deadline, f"waited {WAIT} s for the report of rank {rank}"
        assert launcher.poll() is None, "all ranks ended before they reported"
        time.sleep(0.05)
    document: dict[str, object] = json.loads(file.read_text())
    return document


def test_processes_compute_what_threads_compute_and_a_killed_rank_restarts_the_others(
    job: RLHFJob, tmp_path: Path
) -> None:
    (tmp_path / "job.json").write_text(job.model_dump_json(by_alias=True))
    (tmp_path / "saved").mkdir()
    port = free_port()
    launcher = start_ranks(tmp_path, port)
    assert launcher.stdout is not None
    pids: list[int] = []
    server = grpc.server(ThreadPoolExecutor(WORLD))
    control_pb2_grpc.add_CoordinatorServicer_to_server(BatchServer(), server)
    try:
        expected, metrics = threads_train(job)
        pids = json.loads(launcher.stdout.readline())
        time.sleep(1.0)  # ranks are up and contact a coordinator that does not run yet
        assert server.add_insecure_port(f"127.0.0.1:{port}") == port
        server.start()
        answers = [report_of(tmp_path, rank, launcher) for rank in range(WORLD)]
        check_weights([load_file(tmp_path / f"served-{rank}.safetensors") for rank in range(WORLD)], expected)
        assert [answer["metrics"] for answer in answers] == [metrics] * WORLD
        check_checkpoint(tmp_path / "saved", [answer["files"] for answer in answers], expected)
        os.kill(pids[3], signal.SIGKILL)
        assert json.loads(launcher.stdout.readline()) == [75, 75, 75, -signal.SIGKILL]
        pids = []
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        launcher.wait(WAIT)
        server.stop(None)


def threads_train(job: RLHFJob) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Return weights by stage owner, and last metrics, of the same training with ranks as threads."""

    def work(rank: int, peers: ThreadCommunicator) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        trainer = trainer_of(job, serial(job, 2, 2), rank, WORLD, peers)
        for iteration in range(ITERATIONS):
            samples = make_samples(seed=iteration)
            metrics = exhaust(trainer.train(iteration, batch_from(samples, len(samples), FIELDS)))
        owned = {
            f"{model}:{name}": optimizer.parameters[name].detach()
            for (model, _), optimizer in trainer.optimizers.items()
            for name in optimizer.owned
        }
        return owned, metrics

    results = on_ranks(WORLD, work)
    return {name: value for owned, _ in results for name, value in owned.items()}, results[0][1]


def check_weights(served: list[dict[str, torch.Tensor]], expected: dict[str, torch.Tensor]) -> None:
    """Assert that replicas equal each other and the threads' bit by bit (two summands commute, so gloo has no other
    order).
    """
    together = {**served[0], **served[1]}
    assert together.keys() == expected.keys()
    assert {**served[2], **served[3]}.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(together[name], value), name
        assert torch.equal({**served[2], **served[3]}[name], value), name


def check_checkpoint(folder: Path, files: list[object], expected: dict[str, torch.Tensor]) -> None:
    assert files[2:] == [[], []]
    saved: dict[str, torch.Tensor] = {}
    for model in ("actor", "critic"):
        for part in sorted((folder / model).glob("*.safetensors")):
            saved |= {f"{model}:{name}": value for name, value in load_file(part).items()}
    in_files = {name.replace(VALUE_HEAD, HEADS_IN_FILES[VALUE_HEAD]): value for name, value in expected.items()}
    assert saved.keys() == in_files.keys()
    assert all(torch.equal(saved[name], value) for name, value in in_files.items())


if __name__ == "__main__":
    launch(Path(sys.argv[1]))
