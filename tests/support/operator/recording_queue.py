"""A work queue that records the enqueued keys and processes none."""


class RecordingQueue:
    """Records the enqueued keys."""

    def __init__(self) -> None:
        self.keys: list[str] = []

    def add(self, key: str) -> None:
        """Record a key."""
        self.keys.append(key)

    def taken(self) -> list[str]:
        """Return the keys enqueued since the last call."""
        keys, self.keys = self.keys, []
        return keys
