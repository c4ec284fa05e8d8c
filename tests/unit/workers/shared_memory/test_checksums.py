"""Checksums from sums of rows and columns change with damaged, missing or misplaced data."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf_workers.shared_memory.checksums import ROW_BYTES, checksums

SIZES = st.integers(1, 3 * ROW_BYTES + 9)


def random_bytes(size: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@given(size=SIZES, where=st.integers(0), damage=st.integers(1, 255))
def test_one_damaged_byte_changes_it(size: int, where: int, damage: int) -> None:
    whole = random_bytes(size)
    spoiled = whole.clone()
    spoiled[where % size] ^= damage
    before, after = checksums([whole, spoiled])
    assert before != after


@given(first=st.integers(0, 5), second=st.integers(0, 5))
def test_pages_out_of_place_or_stale_change_it(first: int, second: int) -> None:
    whole = random_bytes(6 * ROW_BYTES)
    pages = whole.view(6, ROW_BYTES)
    swapped, stale = pages.clone(), pages.clone()
    swapped[[first, second]] = pages[[second, first]]
    stale[first] = pages[second]
    same = first == second
    for other in (swapped, stale):
        assert (checksums([whole]) == checksums([other.view(-1)])) == same


def test_words_out_of_place_change_it() -> None:
    whole = random_bytes(2 * ROW_BYTES)
    words = whole.view(torch.int64).clone()
    words[[3, 700]] = words[[700, 3]]
    assert checksums([whole]) != checksums([words.view(torch.uint8)])


def test_a_tensor_has_the_same_one_alone_and_among_others() -> None:
    parts = [random_bytes(size, seed) for seed, size in enumerate((0, 5, ROW_BYTES, 70 * ROW_BYTES + 8))]
    assert checksums(parts) == [checksums([part])[0] for part in parts]
    assert checksums([]) == []


@pytest.mark.parametrize("rows", [1, 255, 256, 257, 1000])
def test_it_does_not_depend_on_how_rows_are_walked(rows: int) -> None:
    """A CPU sums blocks of rows, a device all at once."""
    part = random_bytes(rows * ROW_BYTES)
    matrix = part.view(torch.int64).view(rows, -1)
    from rlhf_workers.shared_memory.checksums import _rows_and_columns

    by_rows, by_columns = _rows_and_columns(matrix)
    assert torch.equal(by_rows, matrix.sum(1))
    assert torch.equal(by_columns, matrix.sum(0))
