"""A work queue that works on nothing: it notes what is enqueued."""


class RecordingQueue:
    """Notes what is enqueued."""

    def __init__(self) -> None:
        self.keys: list[str] = []

    def add(self, key: str) -> None:
        """Note a key."""
        self.keys.append(key)

    def taken(self) -> list[str]:
        """Return what was enqueued since this was asked last."""
        keys, self.keys = self.keys, []
        return keys
