"""Whether an engine's weights and caches are on its device, and what brings them there in which order.

Rule: weights come before caches and go with them, so new weights can be loaded while caches are still away: that is the
order without a peak. What fails half-way is tried again from there. Must never let a step run on what is away.
"""

from typing import Protocol


class SleepingCore(Protocol):
    """What `Sleeper` needs of vLLM's core."""

    def sleep(self) -> None:
        """Gives weights and caches back."""

    def wake_weights(self) -> None:
        """Brings the weights back."""

    def wake_caches(self) -> None:
        """Brings the caches back."""


class Sleeper:
    """The memory of one core; awake at first."""

    def __init__(self, core: SleepingCore) -> None:
        self._core = core
        self._weights = self._caches = True

    def sleep(self) -> None:
        """Give everything back; nothing where it is away."""
        if not (self._weights or self._caches):
            return
        self._wake()  # vLLM sleeps as a whole
        self._core.sleep()
        self._weights = self._caches = False

    def wake_weights(self) -> None:
        """Bring the weights alone, for others to be loaded in place of them."""
        if not self._weights:
            self._core.wake_weights()
            self._weights = True

    def wake(self) -> None:
        """Bring all that is away."""
        self._wake()

    def _wake(self) -> None:
        self.wake_weights()
        if not self._caches:
            self._core.wake_caches()
            self._caches = True
