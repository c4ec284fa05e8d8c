"""The tokens that tests of the ledger let workers decode: a function of the sample and the position."""

import struct

from rlhf_common.samples import VersionSpan
from rlhf_coordinator.state.sample import PackedResponse


def tokens_at(index: int, start: int, end: int) -> PackedResponse:
    """Return the tokens of a sample at the positions from `start` to before `end`, of version 3."""
    numbers = [index * 100 + position for position in range(start, end)]
    packed = struct.pack(f"<{len(numbers)}i", *numbers)
    return PackedResponse(packed, packed, (VersionSpan(3, len(numbers)),) if numbers else ())
