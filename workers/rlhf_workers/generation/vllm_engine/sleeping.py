"""Tracks whether an engine's weights and caches are on its device, and brings them back in order.

Rule: weights come before caches, so new weights can be loaded while the caches are away.
"""

from typing import Protocol


class SleepingCore(Protocol):
    """The methods of vLLM's core that `Sleeper` needs."""

    def sleep(self) -> None:
        """Free weights and caches."""

    def wake_weights(self) -> None:
        """Bring the weights back."""

    def wake_caches(self) -> None:
        """Bring the caches back."""


class Sleeper:
    """Memory state of one core; awake at first."""

    def __init__(self, core: SleepingCore) -> None:
        self._core = core
        self._weights = self._caches = True

    def sleep(self) -> None:
        """Let the core sleep, after bringing back everything; do nothing if it sleeps."""
        if not (self._weights or self._caches):
            return
        self._wake()  # vLLM sleeps as a whole
        self._core.sleep()
        self._weights = self._caches = False

    def wake_weights(self) -> None:
        """Bring back the weights only, so that new ones can replace them."""
        if not self._weights:
            self._core.wake_weights()
            self._weights = True

    def wake(self) -> None:
        """Bring back everything that is away."""
        self._wake()

    def _wake(self) -> None:
        self.wake_weights()
        if not self._caches:
            self._core.wake_caches()
            self._caches = True
