"""Memory that a process may use on a device shared with others."""

import pytest
import torch

from rlhf_workers.devices.device import device_sharers, free_memory, open_device

GPU = torch.device("cuda:0")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU with 900 free bytes and 100 of this process, of which 40 are in use; reset afterwards."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (900, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 100)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 40)
    monkeypatch.setattr("rlhf_workers.devices.device._sharers", {})


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("sharers", "room"), [(1, 960), (3, 360)])
def test_processes_on_one_device_count_on_their_part_of_what_is_free(sharers: int, room: int) -> None:
    device = open_device("cuda:0", sharers)
    assert device == GPU
    assert device_sharers(device) == sharers
    assert free_memory(device) == room


@pytest.mark.usefixtures("gpu")
def test_a_device_that_was_not_opened_here_is_not_shared() -> None:
    assert device_sharers(GPU) == 1
