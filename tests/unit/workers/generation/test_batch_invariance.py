"""vLLM keeps `deterministic: true` on GPUs with the required kernels, and explains elsewhere why it does not."""

import os
import sys
import types

import pytest
import torch

from rlhf_common.names import ExitCode
from rlhf_workers.failures import WorkError
from rlhf_workers.generation.vllm_engine.batch_invariance import VARIABLE, obstacle, require_batch_invariance

GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    monkeypatch.setenv(VARIABLE, "0")


def gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (12, 0)])
def test_a_gpu_with_the_kernels_is_told_to_use_them(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu(monkeypatch, capability)
    require_batch_invariance(GPU)
    assert os.environ[VARIABLE] == "1"


@pytest.mark.parametrize(
    ("device", "says"),
    [
        (torch.device("cpu"), "kernels for CPU sum in an order that depends on the batch; .*engine torch"),
        (torch.device("xla"), "no batch-invariant kernels for xla"),
        (GPU, "need compute capability 8.0, Some GPU has 7.5"),
    ],
)
def test_elsewhere_it_is_refused_with_field_value_and_reason(
    device: torch.device, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu(monkeypatch, (7, 5))
    with pytest.raises(WorkError, match=f"spec.deterministic: true cannot be guaranteed: .*{says}") as raised:
        require_batch_invariance(device)
    assert (raised.value.failure.field, raised.value.failure.exit_code) == ("spec.deterministic", ExitCode.USAGE)
    assert obstacle(device)
    assert os.environ[VARIABLE] == "0"


def test_a_vllm_that_was_imported_before_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch, (9, 0))
    monkeypatch.setitem(sys.modules, "vllm", types.ModuleType("vllm"))
    with pytest.raises(WorkError, match="imported without VLLM_BATCH_INVARIANT=1"):
        require_batch_invariance(GPU)
    monkeypatch.setenv(VARIABLE, "1")
    require_batch_invariance(GPU)
