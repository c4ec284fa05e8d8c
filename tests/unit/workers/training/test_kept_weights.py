"""A rank that keeps the weights from before its training serves them during and after it, bit for bit."""

from pathlib import Path

import pytest
import torch
from tests.support.training.training_ranks import ThreadCommunicator, on_ranks
from tests.support.training.training_roles import finish, role_of, train
from tests.support.workers.outbox import RecordedOutbox

from rlhf_common import control_pb2 as pb
from rlhf_workers.failures import WorkError
from rlhf_workers.training.training_role import TrainingRole


def copied_weights(role: TrainingRole, version: int) -> dict[str, torch.Tensor]:
    return {
        f"{model}/{name}": value.clone()
        for model in ("actor", "critic")
        for name, value in role.tensors(model, version)
    }


def keeping_command(number: int, iteration: int) -> pb.Command:
    return pb.Command(id=number, train=pb.Train(iteration=iteration, keep=True))


def test_what_it_began_with_is_served_beside_what_it_trains(folder: Path) -> None:
    def work(rank: int, peers: ThreadCommunicator) -> None:
        role = role_of(folder, peers, rank)
        outbox = RecordedOutbox()
        role.handle(train(0, 1), outbox)
        finish(role, outbox)
        before = copied_weights(role, 1)
        assert role.kept_version == 0
        role.handle(keeping_command(2, 1), outbox)
        assert role.kept_version == 1
        during = copied_weights(role, 1)
        finish(role, outbox)
        after, trained = copied_weights(role, 1), copied_weights(role, 2)
        for name, value in before.items():
            assert torch.equal(value, during[name])
            assert torch.equal(value, after[name])
        assert any(not torch.equal(value, trained[name]) for name, value in before.items())
        role.handle(train(2, 3), outbox)
        assert role.kept_version == 0, "nobody decodes by it any more"
        with pytest.raises(WorkError, match="actor version 1 was asked for"):
            copied_weights(role, 1)
        finish(role, outbox)

    on_ranks(2, work)
