"""A rank's weights in one region: converted tensors are copied in order, and none is overwritten during a read."""

import threading
from collections.abc import Iterator

import pytest
import torch
from tests.support.workers.delayed_copies import DelayedCopies
from tests.support.workers.weight_lender import VersionedWeights, weights_of

from rlhf_common import control_pb2 as pb
from rlhf_workers.failures import WorkError
from rlhf_workers.shared_memory.host_regions import HostSharing
from rlhf_workers.shared_memory.regions import RegionRefusedError
from rlhf_workers.weights import copies as weight_copies
from rlhf_workers.weights.copies import MOST_COPIES, WeightCopies, WeightCopy
from rlhf_workers.worker_role import WeightProvider

SHARING = HostSharing()


def taken(copies: WeightCopies, provider: WeightProvider, version: int) -> WeightCopy:
    request = pb.WeightRequest(model="actor", version=version)
    return copies.take(provider, request, SHARING.place)


def holds(copy: WeightCopy, version: int) -> bool:
    found = dict(copy.tensors())
    return all(torch.equal(found[name], tensor) for name, tensor in weights_of(version).items())


@pytest.fixture
def copies() -> Iterator[WeightCopies]:
    store = WeightCopies((SHARING,))
    yield store
    store.close()


def test_tensors_that_were_converted_just_now_are_copied_behind_their_conversion(
    copies: WeightCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU nothing is copied before it is waited for, and each tensor is new."""
    stream = DelayedCopies(each_computed=True)
    monkeypatch.setattr(weight_copies, "copies_of", lambda device: stream)
    copy = taken(copies, VersionedWeights(1), 1)
    assert holds(copy, 1)
    assert stream.waits == 1
    copies.give_back(copy, read=True)


def test_one_copy_serves_all_readers_and_its_memory_the_next_version(copies: WeightCopies) -> None:
    provider = VersionedWeights(1)
    first, second = taken(copies, provider, 1), taken(copies, provider, 1)
    assert first is second
    region = first.region
    for copy in (first, second):
        copies.give_back(copy, read=True)
    provider.version = 2
    third = taken(copies, provider, 2)
    assert third.region is region
    assert holds(third, 2)
    copies.give_back(third, read=True)


def test_readers_that_stay_do_not_take_all_memory(copies: WeightCopies) -> None:
    provider = VersionedWeights(0)
    late = []
    for version in range(1, MOST_COPIES + 1):
        provider.version = version
        late.append(taken(copies, provider, version))
    provider.version += 1
    with pytest.raises(
        RegionRefusedError, match=f"{MOST_COPIES} of {MOST_COPIES} copies of weights are still being read"
    ):
        taken(copies, provider, provider.version)
    assert all(holds(copy, version) for version, copy in enumerate(late, 1))
    for copy in late:
        copies.give_back(copy, read=True)
    last = taken(copies, provider, provider.version)
    assert holds(last, provider.version)
    copies.give_back(last, read=True)


class TwoModels(VersionedWeights):
    """Holds the same weights under each model's name."""

    def tensors(self, model: str, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        yield from super().tensors("actor", version)


def test_a_refusal_counts_only_copies_with_readers(copies: WeightCopies) -> None:
    provider = TwoModels(1)
    critic = copies.take(provider, pb.WeightRequest(model="critic", version=1), SHARING.place)
    copies.give_back(critic, read=True)
    late = []
    for version in range(1, MOST_COPIES):
        provider.version = version
        late.append(taken(copies, provider, version))
    provider.version += 1
    with pytest.raises(RegionRefusedError, match=f"{MOST_COPIES - 1} of {MOST_COPIES} copies of weights are still"):
        taken(copies, provider, provider.version)
    for copy in late:
        copies.give_back(copy, read=True)


class ChangingWeights(VersionedWeights):
    """Advances to the next version in the middle of the second read."""

    def __init__(self) -> None:
        super().__init__(1)
        self.read = 0

    def tensors(self, model: str, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in super().tensors(model, version):
            self.read += 1
            if self.read == len(weights_of(1)) + 4:
                self.version = 2
            yield name, tensor


def test_a_version_that_changes_mid_way_is_no_copy(copies: WeightCopies) -> None:
    with pytest.raises(WorkError, match="holds actor version 2"):
        taken(copies, ChangingWeights(), 1)
    copy = taken(copies, VersionedWeights(1), 1)
    assert holds(copy, 1)
    copies.give_back(copy, read=True)


def test_readers_that_come_at_once_share_one_copy(copies: WeightCopies) -> None:
    provider, found = VersionedWeights(1), list[WeightCopy]()
    threads = [threading.Thread(target=lambda: found.append(taken(copies, provider, 1))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(copy) for copy in found}) == 1
    assert found[0].readers == len(threads)
    for copy in found:
        copies.give_back(copy, read=True)


def test_a_machine_without_memory_to_spare_lends_none() -> None:
    scarce = HostSharing(spare=lambda: 1000)
    with pytest.raises(RegionRefusedError, match="501 bytes are more than half of the 1000 bytes of memory"):
        scarce.allocate(501)
    scarce.allocate(500).close()
    assert SHARING.allocate(1 << 20).memory.shape == (1 << 20,)
