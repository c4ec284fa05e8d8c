"""The training backends are listed once for users and once for workers, and the lists agree."""

from pathlib import Path

import pytest
import torch
from tests.support.training.training_ranks import make_job

from rlhf_api.rules.unavailable import UNAVAILABLE
from rlhf_api.structural_schema import schema_at
from rlhf_common import control_pb2 as pb
from rlhf_common.names import ExitCode
from rlhf_workers.failures import WorkError
from rlhf_workers.training.backends import megatron_backend, registry
from rlhf_workers.training.backends.registry import BACKENDS, FIELD, build_backend


def test_the_manifest_offers_what_workers_have_and_names_what_they_lack() -> None:
    schema = schema_at(FIELD)
    assert schema is not None
    lacking = {lack.value for lack in UNAVAILABLE if lack.field == FIELD}
    assert set(schema["enum"]) - lacking == set(BACKENDS)


def test_a_backend_that_a_worker_lacks_is_named_with_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job(Path("unused"), training={"backend": "megatron"})
    monkeypatch.setattr(registry, "BACKENDS", {"torch": BACKENDS["torch"]})
    with pytest.raises(WorkError, match="megatron is not available in this worker; use torch") as caught:
        build_backend(job, pb.BecomeTraining(), torch.device("cpu"), lambda *_, **__: None)
    assert (caught.value.failure.field, caught.value.failure.exit_code) == (FIELD, ExitCode.USAGE)


def test_an_image_without_megatron_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job(Path("unused"), training={"backend": "megatron"})
    monkeypatch.setattr(megatron_backend, "find_spec", lambda name: None)
    with pytest.raises(WorkError, match=r"install rlhf-operator\[megatron\] into it, or use torch") as caught:
        build_backend(job, pb.BecomeTraining(), torch.device("cpu"), lambda *_, **__: None)
    assert (caught.value.failure.field, caught.value.failure.exit_code) == (FIELD, ExitCode.USAGE)
