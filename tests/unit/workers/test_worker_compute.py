"""The compute thread: commands in order, roles in turn, samples returned, and every exception reported."""

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from rlhf_api.job import RLHFJob
from rlhf_common import control_pb2 as pb
from rlhf_common.names import ExitCode
from rlhf_workers.compute import Compute
from rlhf_workers.failures import WorkError
from rlhf_workers.outbox import SessionOutbox
from rlhf_workers.worker_role import Outbox


class Counting:
    """A role that decodes one token of each sample per step, and fails on request."""

    handles = frozenset({"generate", "load_weights", "train", "measure", "offload"})

    def __init__(self, name: str, model: str) -> None:
        self.name, self.model = name, model
        self.handles = frozenset({"train"}) if name == "training" else self.handles
        self.held: dict[int, int] = {}
        self.loaded = 0
        self.fault: Exception | None = None
        self.broken: BaseException | None = None
        self.training: int | None = None
        self.closed = False
        self.offloads = 0
        self.threads: set[int] = set()
        self.asked: list[str] = []
        self.receiver = self

    def handle(self, command: pb.Command, outbox: Outbox) -> None:
        self.threads.add(threading.get_ident())
        kind = command.WhichOneof("command")
        self.asked.append(str(kind))
        if self.broken is not None:
            raise self.broken
        if kind == "train" and self.name != "training":
            self.training = command.id
            return
        if kind == "load_weights":
            if command.load_weights.version < 0:
                raise RuntimeError("no such\nversion")
            self.loaded = command.load_weights.version
        for sample in command.generate.samples:
            self.held[sample.key.sample] = 0
        outbox.done(pb.CommandDone(command_id=command.id))

    def step(self, outbox: Outbox) -> bool:
        self.threads.add(threading.get_ident())
        if self.fault is not None:
            raise self.fault
        for sample in self.held:
            self.held[sample] += 1
        outbox.count(len(self.held))
        time.sleep(0.001)
        return bool(self.held)

    def give_back(self) -> list[pb.SampleProgress]:
        samples = [
            pb.SampleProgress(key=pb.SampleKey(sample=sample), offset=tokens) for sample, tokens in self.held.items()
        ]
        self.held.clear()
        return samples

    def versions(self) -> Mapping[str, int]:
        return {self.model: self.loaded}

    def active(self) -> int:
        return len(self.held)

    def offload(self) -> None:
        assert not self.held
        self.offloads += 1

    def close(self) -> None:
        self.closed = True


class ComputeBench:
    """A compute thread with an outbox that no sender empties."""

    def __init__(self) -> None:
        self.roles: dict[str, Counting] = {}
        self.fatal: list[pb.Failure] = []
        self.outbox = SessionOutbox("generation-0", lambda: None)
        self.compute = Compute(torch.device("cpu"), self.outbox, None, self.fatal.append, self.build)
        self.compute.start(cast(RLHFJob, SimpleNamespace()))

    def build(self, job: RLHFJob, command: pb.Command, device: torch.device, certificates: Path | None) -> Counting:
        kind = str(command.WhichOneof("command"))
        if command.become_inference.tasks:
            raise WorkError("ModelMissing", "there is no such folder", field="spec.models.critic.path")
        model = {"become_generation": "actor", "become_inference": "critic", "become_training": "actor"}[kind]
        role = Counting(kind.removeprefix("become_"), model)
        self.roles[role.name] = role
        return role

    def send(self, number: int, **command: Any) -> None:
        self.compute.submit(pb.Command(id=number, **command))

    def done(self, number: int) -> pb.CommandDone:
        def answer() -> pb.CommandDone | None:
            answers = (message.done for message in self.outbox.unsent() if message.HasField("done"))
            return next((answer for answer in answers if answer.command_id == number), None)

        until(lambda: answer() is not None)
        result = answer()
        assert result is not None
        return result


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "waited 60 s"
        time.sleep(0.002)


@pytest.fixture
def bench() -> ComputeBench:
    return ComputeBench()


def generate(*samples: int) -> pb.Generate:
    return pb.Generate(samples=[pb.GenerateSample(key=pb.SampleKey(sample=sample)) for sample in samples])


def test_roles_live_on_one_thread_and_are_closed_by_it(bench: ComputeBench) -> None:
    bench.send(1, become_generation=pb.BecomeGeneration())
    bench.send(2, generate=generate(0, 1))
    bench.done(2)
    until(lambda: bench.outbox.tokens > 10)
    assert bench.compute.snapshot.roles == ("generation",)
    assert bench.compute.snapshot.active == 2
    assert bench.compute.busy_seconds() > 0
    role = bench.roles["generation"]
    assert bench.compute.close(60)
    assert role.closed
    assert len(role.threads) == 1
    assert threading.get_ident() not in role.threads


def test_what_is_given_back_carries_its_tokens_and_queued_commands_are_forgotten(bench: ComputeBench) -> None:
    bench.send(1, become_generation=pb.BecomeGeneration())
    bench.send(2, generate=generate(0, 1))
    bench.done(2)
    until(lambda: all(bench.roles["generation"].held.values()))
    entered, go_on = threading.Event(), threading.Event()

    def wait(*_: object) -> bool:
        entered.set()
        return go_on.wait(60)

    bench.compute.receive(wait)  # so that the next command stays in the queue
    assert entered.wait(60)
    bench.outbox.fence()
    bench.send(3, generate=generate(2))
    given_back = bench.compute.reset()
    go_on.set()
    returned = given_back.result(60)
    assert {message.key.sample for message in returned} == {0, 1}
    assert all(message.offset > 0 for message in returned)
    assert bench.compute.queued_samples() == 0
    bench.send(4, generate=generate(5))
    bench.done(4)
    assert set(bench.roles["generation"].held) == {5}
    bench.compute.close(60)


def test_weights_go_to_the_role_that_holds_the_model(bench: ComputeBench) -> None:
    bench.send(1, become_generation=pb.BecomeGeneration())
    bench.send(2, become_inference=pb.BecomeInference())
    bench.send(3, load_weights=pb.LoadWeights(model="critic", version=4))
    bench.done(3)
    until(lambda: dict(bench.compute.snapshot.versions) == {"actor": 0, "critic": 4})
    bench.send(4, load_weights=pb.LoadWeights(model="reward", version=4))
    assert bench.done(4).failure.reason == "WrongRole"
    bench.compute.close(60)


def test_a_rank_beside_other_roles_takes_turns_with_them(bench: ComputeBench) -> None:
    def offloads() -> dict[str, int]:
        return {name: role.offloads for name, role in bench.roles.items()}

    bench.send(1, become_training=pb.BecomeTraining())
    bench.send(2, become_generation=pb.BecomeGeneration())
    bench.send(3, become_inference=pb.BecomeInference())
    assert bench.done(3)
    assert offloads() == {"training": 1, "generation": 0, "inference": 0}, "training left before the policy came"
    bench.send(4, train=pb.Train())
    assert bench.done(4)
    assert offloads() == {"training": 1, "generation": 1, "inference": 1}
    bench.send(5, train=pb.Train())
    bench.send(6, load_weights=pb.LoadWeights(model="critic", version=1))
    bench.send(7, generate=generate(1, 2))
    assert bench.done(7)
    assert offloads() == {"training": 2, "generation": 1, "inference": 1}
    bench.send(8, train=pb.Train())
    assert bench.done(8)
    assert bench.roles["generation"].held == {}, "samples that nobody counts on any more"
    unsent = bench.outbox.unsent()
    spans = [message.span.name for message in unsent if message.HasField("span")]
    assert spans.count("offload/generation") == spans.count("offload/training") == 2
    reported = [message.observation.offload.role for message in unsent if message.observation.HasField("offload")]
    assert reported == [name.removeprefix("offload/") for name in spans if name.startswith("offload/")]
    assert bench.compute.snapshot.roles == ("generation", "inference", "training")
    bench.compute.close(60)


def test_measuring_and_parking_go_to_the_role_they_name(bench: ComputeBench) -> None:
    bench.send(1, become_generation=pb.BecomeGeneration())
    bench.send(2, become_inference=pb.BecomeInference(offloaded=True))
    assert bench.done(2)
    until(lambda: bench.compute.snapshot.roles == ("generation", "inference"))
    bench.send(3, measure=pb.Measure(role="inference"))
    bench.send(4, offload=pb.Offload(role="inference"))
    bench.send(5, measure=pb.Measure(role="generation"))
    bench.send(6, measure=pb.Measure())
    assert bench.done(6).failure.reason == "WrongRole"
    assert bench.roles["inference"].asked == ["measure", "offload"]
    assert bench.roles["generation"].asked == ["measure"]
    bench.compute.close(60)
    assert bench.roles["inference"].closed


def test_what_a_worker_decodes_comes_before_what_it_scores(bench: ComputeBench) -> None:
    bench.send(1, become_inference=pb.BecomeInference())
    bench.send(2, become_generation=pb.BecomeGeneration())
    bench.done(2)
    generation, inference = bench.roles["generation"], bench.roles["inference"]
    generation.held[0], inference.held[7] = 0, 0
    bench.send(3, measure=pb.Measure(role="generation"))
    scored = 0
    until(lambda: generation.held[0] > 20)
    assert inference.held[7] == scored
    generation.held.clear()
    until(lambda: inference.held[7] > scored + 20)
    bench.compute.close(60)


def test_peers_are_served_between_steps_and_refused_when_the_session_breaks(bench: ComputeBench) -> None:
    with pytest.raises(WorkError, match="does not decode"):
        bench.compute.receive(lambda role, _: role).result(60)
    bench.send(1, become_generation=pb.BecomeGeneration())
    bench.done(1)
    role = bench.roles["generation"]
    received: tuple[object, int] = bench.compute.receive(lambda taken, _: (taken, threading.get_ident())).result(60)
    assert received == (role, next(iter(role.threads)))
    entered, go_on = threading.Event(), threading.Event()

    def wait(*_: object) -> bool:
        entered.set()
        return go_on.wait(60)

    bench.compute.receive(wait)
    assert entered.wait(60)
    waiting = bench.compute.receive(lambda *_: "too late")
    returned = bench.compute.reset()
    with pytest.raises(WorkError, match="session with the coordinator broke"):
        waiting.result(60)
    go_on.set()
    assert returned.result(60) == []
    bench.compute.close(60)


def test_a_failing_command_is_answered_with_what_happened(bench: ComputeBench) -> None:
    bench.send(1, generate=generate(0))
    failure = bench.done(1).failure
    assert (failure.reason, failure.retryable) == ("WrongRole", True)
    assert "holds no role" in failure.message
    bench.send(2, become_inference=pb.BecomeInference(tasks=["values"]))
    assert bench.done(2).failure.field == "spec.models.critic.path"
    bench.send(3, become_generation=pb.BecomeGeneration())
    bench.send(4, load_weights=pb.LoadWeights(model="actor", version=-1))
    failure = bench.done(4).failure
    assert failure.reason == "Internal"
    assert "test_worker_compute.py:" in failure.message
    assert "in handle: " in failure.message
    bench.send(5, generate=generate(0))
    assert not bench.done(5).HasField("failure")
    bench.compute.close(60)


def test_a_role_that_breaks_in_a_step_fails_its_running_command(bench: ComputeBench) -> None:
    bench.send(1, become_generation=pb.BecomeGeneration())
    bench.done(1)
    bench.send(2, train=pb.Train())
    until(lambda: bench.roles["generation"].training == 2)
    bench.roles["generation"].fault = torch.cuda.OutOfMemoryError("CUDA out of memory. Tried 2 GiB")
    failure = bench.done(2).failure
    assert (failure.reason, failure.field) == ("OutOfMemory", "spec.generation.maxBatchSize")
    assert failure.message.endswith("; lower spec.generation.maxBatchSize")


def test_a_role_that_breaks_outside_any_command_ends_the_process(bench: ComputeBench) -> None:
    bench.send(1, become_generation=pb.BecomeGeneration())
    bench.send(2, generate=generate(0))
    bench.done(2)
    bench.roles["generation"].fault = WorkError("PromptLength", "too long", exit_code=ExitCode(22))
    until(lambda: bool(bench.fatal))
    assert (bench.fatal[0].reason, bench.fatal[0].exit_code) == ("PromptLength", 22)
    assert len(bench.fatal) == 1


def test_a_worker_that_lost_its_device_ends_though_its_command_was_answered(bench: ComputeBench) -> None:
    """Every later call to the GPU would fail, so a worker that stayed would fail all its work."""
    bench.send(1, become_generation=pb.BecomeGeneration())
    bench.done(1)
    bench.roles["generation"].broken = torch.AcceleratorError("CUDA error: misaligned address\nCompile with advice.")
    bench.send(2, generate=generate(0))
    assert bench.done(2).failure.reason == "DeviceLost"
    until(lambda: bool(bench.fatal))
    assert bench.fatal[0].message.endswith("AcceleratorError: CUDA error: misaligned address")


def failing(error: Exception) -> Callable[..., Any]:
    """Return a function that raises `error`."""

    def fail(*_: object) -> Any:
        raise error

    return fail


def test_a_device_lost_while_a_peer_is_served_ends_the_process(bench: ComputeBench) -> None:
    bench.send(1, become_generation=pb.BecomeGeneration())
    bench.done(1)

    with pytest.raises(ValueError, match="its cache"):
        bench.compute.receive(failing(ValueError("its cache"))).result(60)
    with pytest.raises(torch.AcceleratorError):
        bench.compute.receive(failing(torch.AcceleratorError("CUDA error: misaligned address"))).result(60)
    until(lambda: bool(bench.fatal))
    assert [failure.reason for failure in bench.fatal] == ["DeviceLost"]


def test_samples_that_cannot_be_given_back_end_the_process(
    bench: ComputeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.send(1, become_generation=pb.BecomeGeneration())
    bench.done(1)
    lost = torch.AcceleratorError("CUDA error: misaligned address")
    monkeypatch.setattr(bench.roles["generation"], "give_back", failing(lost))
    returned = bench.compute.reset()
    until(lambda: bool(bench.fatal))
    assert bench.fatal[0].reason == "DeviceLost"
    assert not returned.done()


def test_sibling_tokens_that_a_drafter_cannot_take_end_the_process(
    bench: ComputeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.send(1, become_generation=pb.BecomeGeneration())
    bench.done(1)
    role = bench.roles["generation"]
    monkeypatch.setattr(role, "learns_siblings", True, raising=False)
    monkeypatch.setattr(role, "learn", failing(ValueError("no such sample")), raising=False)
    bench.compute.learn(pb.SiblingTokens())
    until(lambda: bool(bench.fatal))
    assert bench.fatal[0].message.endswith("ValueError: no such sample")


def test_code_that_exits_ends_the_process_with_a_reason(bench: ComputeBench) -> None:
    bench.send(1, become_generation=pb.BecomeGeneration())
    bench.done(1)
    bench.roles["generation"].broken = SystemExit(3)
    bench.send(2, generate=generate(0))
    until(lambda: bool(bench.fatal))
    assert bench.fatal[0].message == "the compute thread: RuntimeError: the code called sys.exit(3)"


def test_becoming_again_replaces_the_role(bench: ComputeBench) -> None:
    bench.send(1, become_training=pb.BecomeTraining(group_epoch=3))
    bench.done(1)
    first = bench.roles["training"]
    bench.send(2, become_training=pb.BecomeTraining(group_epoch=4))
    bench.done(2)
    assert first.closed
    until(lambda: bench.compute.snapshot.group_epoch == 4)
    assert bench.compute.snapshot.roles == ("training",)
    bench.compute.close(60)
