"""Triton's kernels match their definition in torch, in Triton's interpreter on the CPU."""

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rlhf_workers.generation.torch_engine.decode_ops import CachePlace, DecodeOps, Rotation, TorchOps

ROWS, HEADS, KV_HEADS, SIZE, CAPACITY, FIRST = 3, 6, 2, 16, 192, 2
TOLERANCE = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
"""Absolute tolerance, for numbers around one."""


@pytest.fixture(scope="module")
def kernels() -> Iterator[DecodeOps]:
    """Return the interpreted kernels: Triton reads the variable when a function of its own or of ours is defined."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        for name in list(sys.modules):
            if name.split(".")[0] == "triton" and not name.startswith("triton._C"):
                patch.delitem(sys.modules, name)
        from triton.runtime import interpreter

        theirs = interpreter._patch_lang_tensor

        def with_index(tensor: Any, scope: Any) -> None:
            theirs(tensor, scope)
            # Triton 3.6 keeps scalars in arrays of one number, which numpy from 2.5 on turns into one by `item` alone.
            scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

        patch.setattr(interpreter, "_patch_lang_tensor", with_index)
        from rlhf_workers.generation.torch_engine.decode_kernels import TritonOps

        yield TritonOps()


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    chosen: torch.dtype = request.param
    return chosen


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(result: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(result, expected, atol=TOLERANCE[result.dtype], rtol=TOLERANCE[result.dtype])


def place(dtype: torch.dtype, positions: list[int]) -> CachePlace:
    """Fill a layer's storage with numbers; a row may read those up to its position."""
    keys, values = (random(16, KV_HEADS, CAPACITY, SIZE, dtype=dtype, seed=seed) for seed in (1, 2))
    return CachePlace(keys, values, torch.tensor(positions), torch.arange(FIRST, FIRST + len(positions)))


@pytest.mark.parametrize("added", [True, False])
def test_norms_and_the_sum_before_them(kernels: DecodeOps, dtype: torch.dtype, added: bool) -> None:
    x = random(ROWS, 48, dtype=dtype, seed=3) if added else None
    gain, residual = random(48, dtype=dtype, seed=4), random(ROWS, 48, dtype=dtype)
    mine, other = residual.clone(), residual.clone()
    close(kernels.add_norm(x, mine, gain, 1e-5), TorchOps().add_norm(x, other, gain, 1e-5))
    close(mine, other)


@pytest.mark.parametrize("normed", [True, False])
def test_heads_are_turned_and_stored_where_they_belong(kernels: DecodeOps, dtype: torch.dtype, normed: bool) -> None:
    qkv = random(ROWS, (HEADS + 2 * KV_HEADS) * SIZE, dtype=dtype)
    angles = random(ROWS, SIZE // 2, dtype=torch.float32, seed=5).repeat(1, 2)
    gains = (random(SIZE, dtype=dtype, seed=6), random(SIZE, dtype=dtype, seed=7)) if normed else None
    turn = Rotation(angles.cos().to(dtype), angles.sin().to(dtype), gains, 1e-6)
    mine, other = (place(dtype, [0, 70, CAPACITY - 1]) for _ in range(2))
    close(kernels.rotate_and_store(qkv, turn, mine, HEADS), TorchOps().rotate_and_store(qkv, turn, other, HEADS))
    close(mine.keys, other.keys)
    close(mine.values, other.values)


@pytest.mark.full(quick=1)
@pytest.mark.parametrize(("window", "dtype"), [(0, torch.float32), (1, torch.float32), (100, torch.float16)])
def test_attention_reads_the_keys_that_a_position_sees(kernels: DecodeOps, dtype: torch.dtype, window: int) -> None:
    """In float16, because the interpreter's matrix product treats bfloat16 as integers."""
    stored = place(dtype, [0, 70, CAPACITY - 1])
    stored.keys[FIRST, :, 1:], stored.values[FIRST + 1, :, 71:] = float("nan"), float("nan")  # nothing reads these
    queries = random(ROWS, HEADS, SIZE, dtype=dtype, seed=8)
    clean = stored._replace(keys=stored.keys.nan_to_num(), values=stored.values.nan_to_num())
    close(kernels.attend(queries, stored, SIZE**-0.5, window), TorchOps().attend(queries, clean, SIZE**-0.5, window))


@pytest.mark.full
def test_several_rows_of_one_sample_read_its_keys(kernels: DecodeOps) -> None:
    stored = place(torch.float32, [5, 6, 70])._replace(rows=torch.tensor([7, 7, 4]))
    queries = random(ROWS, HEADS, SIZE, dtype=torch.float32, seed=8)
    close(kernels.attend(queries, stored, SIZE**-0.5, 0), TorchOps().attend(queries, stored, SIZE**-0.5, 0))


def test_gates(kernels: DecodeOps, dtype: torch.dtype) -> None:
    gate_up = random(ROWS, 2 * 1100, dtype=dtype) * 4
    close(kernels.silu_times(gate_up), TorchOps().silu_times(gate_up))


def test_keys_are_split_among_as_many_programs_as_a_device_has_room_for(kernels: DecodeOps) -> None:
    from rlhf_workers.generation.torch_engine.decode_kernels import MOST_SPLITS, PROGRAMS, splits_of

    for programs in range(1, 3000):
        splits = splits_of(programs)
        assert 1 <= splits <= MOST_SPLITS
        assert splits & (splits - 1) == 0
        assert splits == 1 or programs * splits < 2 * PROGRAMS + programs
