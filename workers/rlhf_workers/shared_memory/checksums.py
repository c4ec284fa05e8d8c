"""Checksums of memory, computed on its own device so that a GPU's bytes need not move to the host.

The bytes form a matrix of 64-bit integers. Its rows and its columns are summed modulo 2^64, and the checksum is the
CRC-32 of these sums and of the bytes after the last row. Damage that cancels out in rows and columns at once is not
detected.
"""

import zlib
from collections.abc import Sequence
from typing import Final

import torch

COLUMNS: Final = 512
"""Integers per row: 4 KiB, a page."""
ROW_BYTES: Final = 8 * COLUMNS
CACHED_ROWS: Final = 256
"""Rows that a CPU sums in both directions while they are in its cache, 1 MiB."""


def checksums(parts: Sequence[torch.Tensor]) -> list[int]:
    """Return the checksum of each uint8 tensor [bytes], contiguous and aligned to 8 bytes, all on one device, which is
    read twice.
    """
    sums: list[torch.Tensor] = []
    for part in parts:
        whole = part.shape[0] // ROW_BYTES * ROW_BYTES
        matrix = part[:whole].view(torch.int64).view(-1, COLUMNS)
        sums += [*_rows_and_columns(matrix), part[whole:]]
    if not sums:
        return []
    counted = [part for part in sums if part.dtype == torch.int64]
    rests = [part for part in sums if part.dtype == torch.uint8]
    host = _split(torch.cat(counted).cpu(), counted), _split(torch.cat(rests).cpu(), rests)
    found = []
    for number in range(len(parts)):
        rows, columns, rest = host[0][2 * number], host[0][2 * number + 1], host[1][number]
        found.append(_crc32(rest, _crc32(columns, _crc32(rows, 0))))
    return found


def _crc32(part: torch.Tensor, before: int) -> int:
    return zlib.crc32(part.numpy().data, before) if part.numel() else before


def _split(joined: torch.Tensor, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return list(torch.split(joined, [part.shape[0] for part in parts]))


def _rows_and_columns(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if matrix.device.type != "cpu":
        return matrix.sum(1), matrix.sum(0)
    columns = torch.zeros(COLUMNS, dtype=torch.int64)
    rows = [torch.zeros(0, dtype=torch.int64)]
    for block in matrix.split(CACHED_ROWS):
        rows.append(block.sum(1))
        columns += block.sum(0)
    return torch.cat(rows), columns
