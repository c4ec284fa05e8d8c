"""Prefixes of the iteration's unfinished samples: what is computed of each under each task, within a budget of bytes.

Rule: memory pressure costs time, never results: what is dropped is computed again. The least recently used sample goes
first, whole. Only samples of one iteration are held, for with the next there are other responses and other weights.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from rlhf_workers.inference.prefix import Prefix
from rlhf_workers.inference.samples import Tokens


@dataclass
class Growing:
    """An unfinished sample."""

    prompt: int
    tokens: Tokens
    """Of prompt and response, all that is known."""
    prefixes: dict[str, Prefix] = field(default_factory=dict)
    """By task."""

    @property
    def bytes(self) -> int:
        """Of all its prefixes."""
        return sum(prefix.bytes for prefix in self.prefixes.values())


class PrefixStore:
    """Holds them by the sample's number."""

    def __init__(self, budget: int) -> None:
        """`budget` in bytes, on the device that scores."""
        self._budget = budget
        self._iteration = -1
        self._samples: OrderedDict[int, Growing] = OrderedDict()
        self._dropped: list[int] = []

    def enter(self, iteration: int) -> bool:
        """Work of this iteration comes: nothing of earlier ones is kept. False: it is of an earlier one itself."""
        if iteration > self._iteration:
            self.clear()
            self._iteration = iteration
        return iteration == self._iteration

    def known(self, sample: int, prompt: int, tokens: Tokens) -> Growing:
        """The sample with these tokens; prefixes of other tokens are dropped."""
        growing = self._samples.setdefault(sample, Growing(prompt, tokens))
        self._samples.move_to_end(sample)
        if not all(prefix.agrees(prompt, tokens) for prefix in growing.prefixes.values()):
            self._dropped.append(sample)
            growing.prefixes.clear()
        growing.prompt, growing.tokens = prompt, tokens
        return growing

    def get(self, sample: int) -> Growing | None:
        """What is held of a sample."""
        return self._samples.get(sample)

    def take(self, sample: int, task: str, prompt: int, tokens: Tokens) -> Prefix | None:
        """The prefix of a finished sample under a task, which is the caller's from here on; None when there is none."""
        growing = self._samples.get(sample)
        prefix = growing.prefixes.pop(task, None) if growing is not None else None
        if growing is not None and not growing.prefixes:
            del self._samples[sample]
        if prefix is None or not prefix.positions:
            return None
        if not prefix.agrees(prompt, tokens):
            self._dropped.append(sample)
            return None
        return prefix

    def make_room(self) -> None:
        """Drops the least recently used samples until the rest fits into the budget."""
        held = self.bytes
        while held > self._budget:
            sample, growing = self._samples.popitem(last=False)
            held -= growing.bytes
            self._dropped.append(sample)

    def drop(self, sample: int) -> None:
        """Nothing is held of it any more."""
        if self._samples.pop(sample, None) is not None:
            self._dropped.append(sample)

    def drop_task(self, task: str) -> None:
        """The model of a task has other weights now."""
        for growing in self._samples.values():
            growing.prefixes.pop(task, None)

    def clear(self) -> None:
        """Holds nothing any more."""
        self._samples.clear()
        self._dropped.clear()

    def told(self) -> list[int]:
        """Samples that were dropped since the last time this was asked."""
        dropped, self._dropped = self._dropped, []
        return dropped

    @property
    def bytes(self) -> int:
        """Keys and values held."""
        return sum(growing.bytes for growing in self._samples.values())
