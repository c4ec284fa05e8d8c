"""Weights that leave a device and return: the same bits, only the planned memory, no copy read too early."""

from typing import Any

import pytest
import torch
from tests.support.workers.outbox import RecordedOutbox
from tests.support.workers.stand_in_memory import StandInMemory
from torch import nn

from rlhf_common import control_pb2 as pb
from rlhf_workers.devices.arbiter import DeviceArbiter
from rlhf_workers.weights.offload import MOVES, OffloadableWeights

HOST = torch.device("cpu")


def model() -> nn.Module:
    torch.manual_seed(3)
    first = nn.Linear(33, 7)
    net = nn.Sequential(first, nn.Linear(7, 5, bias=False).to(torch.bfloat16), nn.LayerNorm(5))
    net.register_buffer("steps", torch.arange(3))
    net.again = first.weight  # tied
    return net


def copied_state(net: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in net.state_dict().items()}


def equal(net: nn.Module, wanted: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, wanted[name]) for name, tensor in net.state_dict().items())


@pytest.mark.parametrize("frozen", [True, False])
def test_weights_come_back_as_they_were_and_host_memory_is_taken_once(frozen: bool) -> None:
    net, memory = model(), StandInMemory()
    wanted = copied_state(net)
    weights = OffloadableWeights(net, HOST, frozen=frozen, memory=memory)
    for _ in range(3):
        weights.offload()
        weights.offload()
        assert equal(net, wanted)
        weights.onload()
        weights.onload()
        assert equal(net, wanted)
    assert len(memory.taken) == 1
    parameters = 4 * (33 * 7 + 7 + 5 + 5) + 2 * 35 + 8 * 3
    assert parameters <= memory.taken[0] <= parameters + 256 * 6
    assert memory.on_device_bytes == 3 * parameters
    assert not memory.stream.queued


def test_ties_stay_ties() -> None:
    net = model()
    weights = OffloadableWeights(net, HOST, frozen=False, memory=StandInMemory())
    weights.offload()
    weights.onload()
    assert net.again is net[0].weight  # type: ignore[index]


def test_what_was_loaded_while_it_was_offloaded_comes_to_the_device() -> None:
    net = model()
    weights = OffloadableWeights(net, HOST, frozen=False, memory=StandInMemory())
    weights.offload()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(2.5)
    weights.onload()
    assert all(bool((parameter == 2.5).all()) for parameter in net.parameters())


def test_what_changed_on_the_device_is_kept_unless_it_is_frozen() -> None:
    for frozen in (True, False):
        net, memory = model(), StandInMemory()
        wanted = copied_state(net)
        weights = OffloadableWeights(net, HOST, frozen=frozen, memory=memory)
        weights.offload()
        weights.onload()
        if not frozen:
            with torch.no_grad():
                next(net.parameters()).add_(1)
            wanted = copied_state(net)
        copied = memory.stream.copied
        weights.offload()
        assert equal(net, wanted)
        assert memory.stream.copied == copied + (0 if frozen else 6)


@pytest.mark.parametrize("read_before", [0, 1, 3])
def test_who_reads_while_weights_leave_or_come_sees_the_same_numbers(read_before: int) -> None:
    net = model()
    wanted = copied_state(net)
    weights = OffloadableWeights(net, HOST, frozen=False, memory=StandInMemory())
    for move in (weights.offload, weights.onload):
        reading = ((name, parameter.detach()) for name, parameter in net.named_parameters())
        read = [next(reading) for _ in range(read_before)]
        move()
        read += list(reading)
        assert len(read) == 5
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in read)


def test_a_device_without_memory_leaves_everything_in_host_memory() -> None:
    net, memory = model(), StandInMemory()
    wanted = copied_state(net)
    weights = OffloadableWeights(net, HOST, frozen=False, memory=memory)
    weights.offload()
    memory.fails_at = 4
    with pytest.raises(torch.cuda.OutOfMemoryError):
        weights.onload()
    assert weights.offloaded
    assert equal(net, wanted)
    weights.onload()
    assert equal(net, wanted)


def test_tensors_that_came_later_get_host_memory_of_their_own() -> None:
    """Moments of an optimizer, after the first step."""
    net, memory = model(), StandInMemory()
    weights = OffloadableWeights(net, HOST, frozen=False, memory=memory)
    weights.offload()
    weights.onload()
    net.register_buffer("moment", torch.full((11,), 4.0))
    weights.offload()
    weights.onload()
    assert len(memory.taken) == 2
    assert torch.equal(net.get_buffer("moment"), torch.full((11,), 4.0))


def test_bytes_and_time_are_counted() -> None:
    net = model()
    weights = OffloadableWeights(net, HOST, frozen=False, memory=StandInMemory())
    before = MOVES.totals().get("offload", (0, 0.0))[0]
    weights.offload()
    assert (
        MOVES.totals()["offload"][0] - before == sum(tensor.nbytes for tensor in net.state_dict().values()) - 4 * 33 * 7
    )


class SleepingRole:
    """A role that records when it is put to sleep."""

    name = "generation"

    def give_back(self) -> list[pb.SampleProgress]:
        return []

    def offload(self) -> None:
        FREED.append(self.name)


FREED: list[str] = []


def test_a_turn_says_how_much_memory_it_freed() -> None:
    outbox, unused = RecordedOutbox(), iter([1000, 5000])
    role: Any = SleepingRole()
    arbiter = DeviceArbiter({"generation": role}, unused=lambda: next(unused))
    arbiter.begin("training", "train", outbox)
    name, *_, attributes = outbox.reports("span")[0]
    assert (name, attributes) == ("offload/generation", {"freed": "4000", "unused": "5000"})
    assert FREED == ["generation"]


class TurningRole:
    """A role of one side, which records requests and whether it takes weights while asleep."""

    def __init__(self, name: str, *, loads_while_offloaded: bool) -> None:
        self.name, self.able, self.offloaded = name, loads_while_offloaded, False

    @property
    def loads_while_offloaded(self) -> bool:
        return self.able and self.offloaded

    def give_back(self) -> list[pb.SampleProgress]:
        return []

    def offload(self) -> None:
        self.offloaded = True


@pytest.mark.parametrize("able", [True, False])
def test_weights_are_loaded_before_the_rank_leaves_the_device_where_the_sleeper_takes_them_there(able: bool) -> None:
    generation = TurningRole("generation", loads_while_offloaded=able)
    training = TurningRole("training", loads_while_offloaded=False)
    roles: Any = {"generation": generation, "training": training}
    arbiter = DeviceArbiter(roles)
    outbox = RecordedOutbox()
    arbiter.begin("generation", "generate", outbox)
    arbiter.begin("training", "train", outbox)
    assert generation.offloaded
    training.offloaded = False
    arbiter.begin("generation", "load_weights", outbox)
    assert training.offloaded is not able
    arbiter.begin("generation", "generate", outbox)
    assert training.offloaded


def test_a_role_that_is_awake_takes_weights_in_its_own_turn() -> None:
    generation = TurningRole("generation", loads_while_offloaded=True)
    training = TurningRole("training", loads_while_offloaded=False)
    roles: Any = {"generation": generation, "training": training}
    arbiter = DeviceArbiter(roles)
    arbiter.begin("training", "train", RecordedOutbox())
    generation.offloaded = False  # as after a start, when it was never put to sleep
    arbiter.begin("generation", "load_weights", RecordedOutbox())
    assert training.offloaded
