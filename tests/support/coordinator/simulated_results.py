"""Results of simulated workers: tokens from (random key, position), scores from tokens, weights from batches.

Rule: pure, so that a test can compute the result of an undisturbed run without workers.
"""

import hashlib
import struct

from rlhf_common import control_pb2 as pb

VOCABULARY = 1000
JUDGING = ("reward", "cost")
"""Tasks with one number as result."""


def seed_of(random_key: int, prompt: bytes, drawing: int) -> int:
    """Return the seed of a response: its random key, or for a greedy one its prompt."""
    if drawing != pb.DRAWING_GREEDY:
        return random_key
    return int.from_bytes(hashlib.blake2b(prompt, digest_size=8).digest(), "little")


def response_length(random_key: int, limit: int) -> int:
    """Return the number of tokens of a response: 1 .. limit."""
    return 1 + random_key % limit


def token(random_key: int, position: int) -> int:
    """Return the token at a position of the response."""
    digest = hashlib.blake2b(struct.pack("<QI", random_key, position), digest_size=4).digest()
    return int.from_bytes(digest, "little") % VOCABULARY


def response(random_key: int, start: int, end: int) -> tuple[bytes, bytes]:
    """Return (tokens, log-probabilities) of positions start .. end-1, packed."""
    tokens = [token(random_key, position) for position in range(start, end)]
    return struct.pack(f"<{len(tokens)}i", *tokens), struct.pack(f"<{len(tokens)}f", *(-t / 1000 for t in tokens))


def score(task: str, tokens: bytes) -> bytes:
    """Return the packed result of a scoring task: one number for a reward or a cost, else one per token."""
    numbers = struct.unpack(f"<{len(tokens) // 4}i", tokens)
    if task in JUDGING:
        return struct.pack("<f", sum(numbers) % 101 / 100)
    shift = 1 if task == "reference" else 2
    return struct.pack(f"<{len(numbers)}f", *(-(number + shift) / 1000 for number in numbers))


def next_weights(weights: str, samples: list[pb.TrainSample]) -> str:
    """Return the weights after training on a batch."""
    digest = hashlib.sha256(weights.encode())
    for sample in samples:
        digest.update(sample.SerializeToString(deterministic=True))
    return digest.hexdigest()
