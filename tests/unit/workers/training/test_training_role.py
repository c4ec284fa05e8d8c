"""The training role as seen by the agent: commands, versions, served weights, and behaviour after the loss of a
peer."""

from pathlib import Path

import pytest
import torch
import transformers
from tests.support.model_folders import models
from tests.support.training.training_ranks import ThreadCommunicator, make_samples, on_ranks
from tests.support.training.training_roles import finish, role_of, stage_copies, train, trainer_in
from tests.support.workers.outbox import RecordedOutbox

from rlhf_common import control_pb2 as pb
from rlhf_workers.failures import WorkError
from rlhf_workers.training.communication.communicator import PeerLostError
from rlhf_workers.training.schedule.progress_counter import finished_units
from rlhf_workers.training.stages.model_stages import read_config
from rlhf_workers.weights.tensor_file import model_tensors


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.write_policy(tmp_path_factory.mktemp("models") / "qwen2", "qwen2", seed=1)


def test_a_rank_that_slept_between_two_trainings_holds_the_same_bits(folder: Path) -> None:
    def work(rank: int, peers: ThreadCommunicator) -> dict[str, torch.Tensor]:
        role, outbox = role_of(folder, peers, rank), RecordedOutbox()
        for iteration in range(2):
            outbox.answers.clear()
            role.handle(train(iteration), outbox)
            finish(role, outbox)
            if sleeping:
                role.offload()
                role.offload()
        moved = {id(tensor) for copy in stage_copies(trainer_in(role)) for tensor in copy._tensors()}
        for optimizer in trainer_in(role).optimizers.values():
            assert moved >= {id(value) for value in (*optimizer.parameters.values(), *optimizer.moments())}
            assert len(list(optimizer.moments())) == 2 * len(optimizer.parameters)
            assert bool(len(optimizer.gradients)) is not sleeping
        # What sleeps is served to peers and saved all the same.
        served = {name: tensor.clone() for name, tensor in role.tensors("actor", 2)}
        moments = next(iter(trainer_in(role).optimizers.values())).state()
        assert outbox.spans.count("onload/training") == len(outbox.reports("onload")) == int(sleeping)
        return served | {f"moment {name}": value.clone() for name, value in moments.items()}

    sleeping = False
    onloaded = on_ranks(2, work)
    sleeping = True
    for state, expected in zip(on_ranks(2, work), onloaded, strict=True):
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[name], expected[name]) for name in state)


def test_a_train_is_done_in_bounded_steps_and_answered_once(folder: Path) -> None:
    def work(rank: int, peers: ThreadCommunicator) -> None:
        outbox = RecordedOutbox()
        role = role_of(folder, peers, rank, algorithm={"ppo": {"miniBatchSize": 4, "epochs": 2}})
        role.handle(train(0), outbox)
        steps, pieces = 0, finished_units()
        while not outbox.answers:
            assert role.step(outbox)
            steps += 1
        assert steps == 2 * 2 + 1
        assert finished_units() - pieces >= 8 + steps, "by which a long step is told from one that hangs"
        assert not role.step(outbox)
        result = outbox.answers[0].train
        assert (result.iteration, result.version) == (0, 1)
        assert result.metrics["train/seconds"] > 0
        assert 0 <= result.metrics["bubble_share"] <= 1
        steps_reported = [step.train_step.number for step in outbox.reports("train_step")]
        assert steps_reported == ([] if rank else [0, 1, 2, 3]), "ranks step together: the first one reports for all"
        assert role.versions() == {"actor": 1, "critic": 1}
        assert outbox.spans.count("train/actor/F") == 8
        assert {"train/fetch", "train/advantages", "train/gradients", "train/optimizer"} <= set(outbox.spans)
        assert outbox.tokens == 2 * sum(len(sample.response.data) // 4 for sample in make_samples(seed=0))
        role.handle(train(0, number=9), outbox)  # its answer was lost with a session: the same one again
        assert (outbox.answers[1].command_id, outbox.answers[1].train) == (9, result)
        with pytest.raises(WorkError, match="train iteration 3 came to a rank that holds version 1"):
            role.handle(train(3), outbox)

    on_ranks(2, work)


def test_the_ranks_together_serve_the_whole_model_under_its_own_names(folder: Path, tmp_path: Path) -> None:
    def work(rank: int, peers: ThreadCommunicator) -> dict[str, dict[str, torch.Tensor]]:
        outbox = RecordedOutbox()
        role = role_of(folder, peers, rank)
        role.handle(train(0), outbox)
        with pytest.raises(WorkError, match="actor version 0 was asked for; this rank trains version 1"):
            list(role.tensors("actor", 0))
        finish(role, outbox)
        with pytest.raises(WorkError, match="actor version 0 was asked for; this rank holds version 1"):
            list(role.tensors("actor", 0))
        return {model: dict(role.tensors(model, 1)) for model in ("actor", "critic")}

    first, last = on_ranks(2, work)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    served = {**first["actor"], **last["actor"]}
    assert not first["actor"].keys() & last["actor"].keys()
    assert served.keys() == {name for name, _ in model.named_parameters()}
    before = dict(model.named_parameters())
    assert all(
        value.shape == before[name].shape and not torch.equal(value, before[name]) for name, value in served.items()
    )
    critic = {**first["critic"], **last["critic"]}
    assert critic.keys() == {*served, "value_head.weight"}


def test_a_rank_that_trains_does_not_checkpoint(folder: Path, tmp_path: Path) -> None:
    role = role_of(folder, ThreadCommunicator.__new__(ThreadCommunicator))
    save = pb.Command(id=2, save_checkpoint=pb.SaveCheckpoint(folder=str(tmp_path), iteration=0))
    outbox = RecordedOutbox()
    role.handle(save, outbox)
    assert {file.path for file in outbox.answers[0].checkpoint.files} == {
        "actor/model-stage-00000.safetensors",
        "critic/model-stage-00000.safetensors",
        "optimizer/actor-stage-00000.safetensors",
        "optimizer/critic-stage-00000.safetensors",
        "trainer.json",
    }
    role.handle(train(0), outbox)
    with pytest.raises(WorkError, match="saveCheckpoint came to a rank that is training"):
        role.handle(save, outbox)


def test_a_lost_peer_ends_the_process_with_the_code_that_asks_for_a_restart(folder: Path) -> None:
    class Gone(ThreadCommunicator):
        def __init__(self) -> None: ...

        def send(self, tensor: torch.Tensor, peer: int) -> None:  # type: ignore[override]
            raise PeerLostError(f"rank {peer}", RuntimeError("Connection closed by peer"))

    left: list[int] = []
    role = role_of(folder, Gone(), leave=left.append)
    outbox = RecordedOutbox()
    role.handle(train(0), outbox)
    role.step(outbox)
    assert left == [75]
    assert not outbox.answers


def test_a_rank_that_failed_half_way_holds_no_version(folder: Path) -> None:
    def work(rank: int, peers: ThreadCommunicator) -> None:
        optimizer = {"learningRate": 1e-2, "maxNonFiniteSteps": 0}
        role = role_of(folder, peers, rank, algorithm={"ppo": {"miniBatchSize": 4}}, training={"optimizer": optimizer})
        outbox = RecordedOutbox()
        role.handle(train(0), outbox)
        role.step(outbox)
        for stage in trainer_in(role).stages.values():
            for parameter in stage.parameters():
                parameter.data.fill_(float("nan"))
        with pytest.raises(WorkError, match=r"the gradient of the actor is nan \(.*\).* at optimizer step 1"):
            role.step(outbox)
        for attempt in (lambda: role.handle(train(0), outbox), lambda: list(role.tensors("actor", 0))):
            with pytest.raises(WorkError, match="holds no whole version") as caught:
                attempt()
            assert caught.value.failure.exit_code == 75

    on_ranks(2, work)


def test_another_version_is_refused_also_for_a_model_that_a_rank_does_not_publish(folder: Path) -> None:
    def work(rank: int, peers: ThreadCommunicator) -> None:
        role = role_of(folder, peers, rank)
        assert list(role.tensors("reward", 0)) == []
        for model in ("actor", "critic", "reward"):
            with pytest.raises(WorkError, match=f"{model} version 3 was asked for; this rank holds version 0"):
                next(role.tensors(model, 3), None)

    on_ranks(2, work)


def test_unsupported_models_and_too_many_stages_are_named(folder: Path, tmp_path: Path) -> None:
    transformers.AutoConfig.for_model("gpt2").save_pretrained(tmp_path)
    with pytest.raises(WorkError, match=r"spec.models.actor.path: .* model_type 'gpt2'; training cuts llama, mistral"):
        read_config(tmp_path, "spec.models.actor.path", 1)
    with pytest.raises(WorkError, match=r"spec.training.parallelism.pipeline: 3 stages .* at most 2"):
        read_config(folder, "spec.models.actor.path", 3)
    with pytest.raises(WorkError, match=r"spec.models.actor.path: .*it holds no model.safetensors"):
        model_tensors(tmp_path, "spec.models.actor.path")
