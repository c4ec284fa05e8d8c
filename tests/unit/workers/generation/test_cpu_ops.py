"""Fused passes on a CPU equal the definition: ragged rows, shared keys, windows; engines draw the same tokens."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.model_folders.models import write_policy
from tests.support.workers.engine_driving import MakeEngine, finish, requests, same_tokens

from rlhf_workers.generation.torch_engine.cpu_ops import CachedRow, CpuOps, cached_rows, runs_of
from rlhf_workers.generation.torch_engine.decode_ops import CachePlace, DecodeOps, Rotation, TorchOps
from rlhf_workers.generation.torch_engine.forward import CausalForward
from rlhf_workers.generation.torch_engine.fused_forward import FAMILIES, fused_forward_for
from rlhf_workers.models.loading import load_causal_lm, replace_weights

HEADS, KV_HEADS, SIZE, CAPACITY, FIRST = 6, 2, 16, 4096, 2
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2}


def random(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def layer(
    ops: DecodeOps, positions: list[int], dtype: torch.dtype, window: int, gains: bool, pool: list[int] | None = None
) -> list[torch.Tensor]:
    """Return everything that a layer's steps return or change; `pool` has the rows except those from FIRST on."""
    rows, at = len(positions), torch.tensor(positions)
    keys, values = (random(8, KV_HEADS, CAPACITY, SIZE, dtype=dtype, seed=seed) for seed in (1, 2))
    angles = random(rows, SIZE // 2, dtype=torch.float32, seed=3).repeat(1, 2)
    norms = (random(SIZE, dtype=dtype, seed=4), random(SIZE, dtype=dtype, seed=5)) if gains else None
    turn = Rotation(angles.cos().to(dtype), angles.sin().to(dtype), norms, 1e-6)
    place = CachePlace(keys, values, at, torch.tensor(pool or range(FIRST, FIRST + rows)))
    residual, added = (random(rows, 32, dtype=dtype, seed=seed) for seed in (6, 7))
    ops.begin(at, place.rows, turn.sin)
    normed = ops.add_norm(added, residual, random(32, dtype=dtype, seed=8), 1e-6)
    qkv = random(rows, (HEADS + 2 * KV_HEADS) * SIZE, dtype=dtype, seed=9)
    queries = ops.rotate_and_store(qkv, turn, place, HEADS)
    attended = ops.attend(queries, place, SIZE**-0.5, window)
    gated = ops.silu_times(random(rows, 64, dtype=dtype, seed=10))
    return [residual, normed, queries, keys, values, attended, gated]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize("positions", [[5], [9, 9, 9], [3, 4000, 0, 17, 16, 2048]], ids=str)
def test_steps_are_those_of_the_definition(dtype: torch.dtype, window: int, positions: list[int]) -> None:
    for gains in (False, True):
        mine, wanted = (layer(ops, positions, dtype, window, gains) for ops in (CpuOps(), TorchOps()))
        for result, expected in zip(mine, wanted, strict=True):
            torch.testing.assert_close(result, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_rows_of_one_sample_read_its_keys_up_to_their_own_positions() -> None:
    positions, pool = [5, 6, 7, 2000, 2001, 2002, 9, 40, 41, 41, 41], [3, 3, 3, 4, 4, 4, 5, 1, 1, 1, 1]
    for window in (0, 7):
        mine, wanted = (layer(ops, positions, torch.float32, window, False, pool) for ops in (CpuOps(), TorchOps()))
        for result, expected in zip(mine[:3] + mine[5:], wanted[:3] + wanted[5:], strict=True):
            torch.testing.assert_close(result[:9], expected[:9], atol=2e-5, rtol=2e-5)


@given(
    lengths=st.lists(st.integers(17, 5000), min_size=1, max_size=80),
    counts=st.lists(st.integers(1, 4), min_size=80, max_size=80),
    spare=st.integers(0, 3000),
)
def test_runs_cover_all_rows_and_read_little_for_nothing(lengths: list[int], counts: list[int], spare: int) -> None:
    pool = [row for row, count in zip(range(len(lengths)), counts, strict=False) for _ in range(count)]
    cached = cached_rows(pool, [lengths[row] - pool[at + 1 :].count(row) for at, row in enumerate(pool)])
    assert cached == [CachedRow(row, counts[row], lengths[row]) for row in range(len(lengths))]
    runs = runs_of(cached, spare)
    assert [row for run in runs for row in range(run.pool, run.pool + run.rows)] == list(range(len(lengths)))
    assert [run.start for run in runs] == [pool.index(run.pool) for run in runs]
    for run in runs:
        own = slice(run.pool, run.pool + run.rows)
        assert run.longest == max(lengths[own])
        assert set(counts[own]) == {run.readers}
    read = sum(run.longest * run.rows for run in runs)
    assert read - sum(lengths) <= spare * (len(lengths) - len(runs)), "a row that joins wastes no more than a call"
    assert len(runs_of([CachedRow(row, 2, 9) for row in range(5)], 0)) == 1


@pytest.mark.full(quick=2)
@pytest.mark.parametrize("architecture", FAMILIES)
def test_tokens_equal_those_of_the_models_own_passes(architecture: str, make_engine: MakeEngine) -> None:
    samples = requests(14, longest=48, response=40)
    engine = make_engine(architecture, fused_kernels="Enabled", slots=9)
    assert (engine.fused, engine.graphs) == (True, None)
    same_tokens(finish(engine, samples), finish(make_engine(architecture, slots=9), samples))
    engine.submit(requests(2))
    report = engine.step()
    assert report.fused_passes == report.passes == 1
    assert not make_engine(architecture, fused_kernels="Enabled", deterministic=True).fused


def test_there_is_one_copy_of_the_weights_and_new_ones_go_into_it(
    policy: Callable[[str], Path], tmp_path: Path
) -> None:
    def forward_of(folder: Path) -> CausalForward:
        cpu = torch.device("cpu")
        model = load_causal_lm(str(folder), field="model", dtype=torch.float32, device=cpu, attention="sdpa")
        forward = CausalForward(model, "model")
        forward.verify()
        return forward

    def weight_bytes(forward: CausalForward) -> int:
        storages = (parameter.untyped_storage() for parameter in forward.model.parameters())
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    forward, other = forward_of(policy("llama")), forward_of(write_policy(tmp_path / "other", "llama", seed=8))
    before = weight_bytes(forward)
    fused = fused_forward_for(forward, CpuOps())
    assert weight_bytes(forward) == before
    replace_weights(forward.model, dict(other.model.named_parameters()), subject="actor version 2")
    fused.verify(other)
