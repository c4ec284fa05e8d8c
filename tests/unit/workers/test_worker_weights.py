"""Weights between workers over real gRPC on loopback: exact bytes, or an error that names the peer."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from safetensors.torch import save_file
from tests.support.loopback import LOOPBACKS, bracketed

from rlhf_api.job.models import Models
from rlhf_common import control_pb2 as pb
from rlhf_operator.certificates import new_authority
from rlhf_workers.failures import WorkError
from rlhf_workers.peer_server import start_server
from rlhf_workers.weights.fetching import FetchPolicy, fetch_weights
from rlhf_workers.weights.source import WeightSourceService
from rlhf_workers.weights.stream import WeightStream

PATIENT = FetchPolicy(attempts=3, backoff_seconds=0.01, describe_seconds=60.0, idle_seconds=60.0)
QUICK = replace(PATIENT, attempts=2, idle_seconds=2.5)
"""For a source that hangs."""
MODELS = Models.model_validate({"actor": {"path": "/policy"}, "reward": {"model": {"path": "/judge"}}})


class HeldStage:
    """A WeightProvider over plain tensors."""

    def __init__(self, tensors: dict[str, torch.Tensor], version: int = 3) -> None:
        self._tensors = tensors
        self._version = version

    def tensors(self, model: str, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        if (model, version) != ("actor", self._version):
            raise WorkError("VersionMismatch", f"holds actor version {self._version}, asked for {model} {version}")
        yield from self._tensors.items()


class Faulty(WeightSourceService):
    """Corrupts the second chunk of the first `times` Fetch calls."""

    def __init__(self, stage: HeldStage, fault: str, times: int = 1000) -> None:
        super().__init__(lambda: stage)
        self.fault, self.times, self.calls = fault, times, 0

    async def Fetch(  # noqa: N802
        self, request: pb.WeightRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[bytes]:
        self.calls += 1
        spoil = self.calls <= self.times
        number = 0
        async for message in super().Fetch(request, context):
            chunk = pb.WeightChunk.FromString(message)
            number += 1
            if spoil and number == 2:
                if self.fault == "flip":
                    chunk.data = bytes([chunk.data[0] ^ 1]) + chunk.data[1:]
                elif self.fault == "die":
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "killed")
                elif self.fault == "hang":
                    await asyncio.sleep(60)
                elif self.fault == "skip":
                    continue
                elif self.fault == "short":
                    return
                elif self.fault == "unknown":
                    chunk.name = "not.announced"
            yield chunk.SerializeToString()


def stage_of(seed: int) -> HeldStage:
    generator = torch.Generator().manual_seed(seed)
    return HeldStage(
        {
            f"layers.{seed}.weight": torch.randn(1200, 1000, generator=generator),  # more than one chunk
            f"layers.{seed}.half": torch.randn(7, 3, generator=generator).to(torch.bfloat16),
            f"layers.{seed}.scalar": torch.tensor(1.5 + seed),
            f"layers.{seed}.empty": torch.empty(0, 4),
        }
    )


@asynccontextmanager
async def serving(
    *sources: WeightSourceService, certificates: Path | None = None, listen: str = "127.0.0.1", host: str = "127.0.0.1"
) -> AsyncIterator[list[pb.WeightLocation]]:
    servers = [await start_server(f"{listen}:0", certificates, source) for source in sources]
    try:
        yield [pb.WeightLocation(address=f"{host}:{server.port}") for server in servers]
    finally:
        for server in servers:
            await server.stop()


def read(
    sources: list[pb.WeightLocation],
    version: int,
    certificates: Path | None = None,
    patience: FetchPolicy = PATIENT,
    *,
    model: str = "actor",
) -> dict[str, torch.Tensor]:
    with fetch_weights(
        model, version, sources, certificates, patience=patience, path_field=MODELS.path_field
    ) as weights:
        return weights.tensors


async def fetched(
    sources: list[pb.WeightLocation],
    version: int = 3,
    certificates: Path | None = None,
    patience: FetchPolicy = PATIENT,
) -> dict[str, torch.Tensor]:
    return await asyncio.to_thread(read, sources, version, certificates, patience)


def source(stage: HeldStage) -> WeightSourceService:
    return WeightSourceService(lambda: stage)


async def test_the_bytes_of_a_failed_attempt_are_no_progress() -> None:
    async with serving(Faulty(stage_of(0), "die", times=1)) as [location]:
        stream = WeightStream("actor", 3, location.address, None)
        with pytest.raises(WorkError, match="killed"):
            await asyncio.to_thread(stream.read, 60.0)
        assert 0 < stream.received < stream.size
        await asyncio.to_thread(stream.read, 60.0)
        assert stream.received == stream.size


async def test_stages_together_give_every_tensor_bit_by_bit() -> None:
    stages = [stage_of(0), stage_of(1)]
    async with serving(*map(source, stages)) as sources:
        tensors = await fetched(sources)
    wanted = {name: tensor for stage in stages for name, tensor in stage.tensors("actor", 3)}
    assert tensors.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name], tensor), name


async def test_a_rank_that_keeps_no_tensor_adds_none() -> None:
    async with serving(source(stage_of(0)), source(HeldStage({}))) as sources:
        assert (await fetched(sources)).keys() == dict(stage_of(0).tensors("actor", 3)).keys()


@pytest.mark.parametrize("host", LOOPBACKS)
async def test_weights_come_by_either_family_from_a_worker_that_listens_as_a_pod_does(host: str) -> None:
    stage = stage_of(0)
    async with serving(source(stage), listen="[::]", host=bracketed(host)) as sources:
        assert (await fetched(sources)).keys() == dict(stage.tensors("actor", 3)).keys()


@pytest.mark.parametrize("fault", ["flip", "die", "hang", "skip", "short", "unknown"])
async def test_a_spoiled_stream_is_read_again(fault: str) -> None:
    stage = stage_of(0)
    faulty = Faulty(stage, fault, times=1)
    async with serving(faulty) as sources:
        tensors = await fetched(sources, patience=QUICK if fault == "hang" else PATIENT)
    assert faulty.calls == 2
    assert all(torch.equal(tensors[name], tensor) for name, tensor in stage.tensors("actor", 3))


@pytest.mark.parametrize(
    ("fault", "reason", "words"),
    [
        ("flip", "WeightsCorrupt", "checksum of layers.0.weight"),
        ("die", "WeightsUnavailable", "unavailable: killed"),
        ("hang", "WeightsUnavailable", "no chunk for "),
        ("short", "WeightsCorrupt", "the stream ended after 4194304 of 4800000 bytes of layers.0.weight"),
        ("unknown", "WeightsCorrupt", "'not.announced'"),
    ],
)
async def test_a_source_that_keeps_failing_gives_nothing_and_is_named(fault: str, reason: str, words: str) -> None:
    faulty, patience = Faulty(stage_of(0), fault), QUICK if fault == "hang" else PATIENT
    async with serving(source(stage_of(1)), faulty) as sources:
        with pytest.raises(WorkError) as caught:
            await fetched(sources, patience=patience)
    assert caught.value.failure.reason == reason
    assert caught.value.failure.retryable
    assert words in str(caught.value)
    assert sources[1].address in str(caught.value)
    assert faulty.calls == patience.attempts


async def test_another_version_is_refused_at_once() -> None:
    faulty = Faulty(stage_of(0), "none")
    async with serving(faulty) as sources:
        with pytest.raises(WorkError, match=r"version 4 from .*holds actor version 3"):
            await fetched(sources, version=4)
    assert faulty.calls == 0


async def test_a_worker_without_weights_says_so() -> None:
    async with serving(WeightSourceService(lambda: None)) as sources:
        with pytest.raises(WorkError, match="holds no weights to serve"):
            await fetched(sources)


async def test_a_version_that_changes_is_described_anew() -> None:
    holder = [HeldStage({"w": torch.zeros(4)}, version=3)]
    async with serving(WeightSourceService(lambda: holder[0])) as sources:
        await fetched(sources)
        holder[0] = HeldStage({"w": torch.ones(4)}, version=3)  # a new process of the same rank, restored
        assert torch.equal((await fetched(sources))["w"], torch.ones(4))


async def test_two_sources_of_one_parameter_are_a_conflict() -> None:
    async with serving(source(stage_of(0)), source(stage_of(0))) as sources:
        with pytest.raises(WorkError, match=r"layers\.0\.weight comes from both") as caught:
            await fetched(sources)
    assert caught.value.failure.reason == "WeightsConflict"


async def test_a_peer_that_is_gone_is_named() -> None:
    async with serving(source(stage_of(0))) as sources:
        pass
    with pytest.raises(WorkError, match=f"from {sources[0].address}: unavailable") as caught:
        await fetched(sources)
    assert caught.value.failure.retryable


async def test_mutual_tls_serves_the_job_and_refuses_every_other(tmp_path: Path) -> None:
    now = datetime.now(UTC)
    for job in ("ours", "theirs"):
        new_authority(job, now).issue([], now).write(tmp_path / job)
    stage = stage_of(0)
    async with serving(source(stage), certificates=tmp_path / "ours") as sources:
        tensors = await fetched(sources, certificates=tmp_path / "ours")
        assert torch.equal(tensors["layers.0.weight"], dict(stage.tensors("actor", 3))["layers.0.weight"])
        for certificates in (tmp_path / "theirs", None):
            with pytest.raises(WorkError, match="unavailable"):
                await fetched(sources, certificates=certificates)


def test_a_folder_is_read_whole(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "model-1.safetensors")
    save_file({"b": torch.zeros(3)}, tmp_path / "model-2.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    tensors = read([pb.WeightLocation(folder=str(tmp_path))], 0)
    assert set(tensors) == {"a", "b"}


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("truncate", "model-1.safetensors is truncated or damaged"),
        ("remove", "it holds no model-1.safetensors"),
        ("index", "model.safetensors.index.json cannot be read"),
        ("promise", "promises c"),
        ("outside", "points outside the folder: '../model.safetensors'"),
        ("empty", "it holds no model.safetensors"),
    ],
)
def test_a_damaged_folder_is_an_error_with_the_file(tmp_path: Path, damage: str, words: str) -> None:
    file, index = tmp_path / "model-1.safetensors", tmp_path / "model.safetensors.index.json"
    save_file({"a": torch.ones(100)}, file)
    places = {"a": "model-1.safetensors"}
    if damage == "promise":
        places["c"] = "model-1.safetensors"
    elif damage == "outside":
        places["c"] = "../model.safetensors"
    index.write_text(json.dumps({"weight_map": places}) if damage != "index" else '{"weight_map')
    if damage == "truncate":
        file.write_bytes(file.read_bytes()[:-10])
    elif damage in ("remove", "empty"):
        file.unlink()
        if damage == "empty":
            index.unlink()
    with pytest.raises(WorkError) as caught:
        read([pb.WeightLocation(folder=str(tmp_path))], 0, model="reward")
    assert words in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert caught.value.failure.exit_code == 21
    assert caught.value.failure.field == "spec.models.reward.model.path"
