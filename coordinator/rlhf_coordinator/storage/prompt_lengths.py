"""The expected response tokens of prompts, by which sorted windows (`spec.prompts.lengthWindow`) are ordered.

Each iteration's first record has the expectations with which it began, so those of the next one follow from its segment
alone. They survive removed segments, kills and, through a checkpoint, a lost run folder.
Rule: expectations depend neither on time nor on the speed of workers, except through prompts that oversampling cuts off
by the clock. Must never count an unfinished response.
"""

import statistics
from collections.abc import Mapping, Sequence

from rlhf_coordinator.state.ledger import Ledger
from rlhf_coordinator.state.sample import SampleState
from rlhf_coordinator.storage.journal_pb2 import PromptLengths
from rlhf_coordinator.storage.prompts import PromptSet


def lengths_after(before: Mapping[int, int], ledger: Ledger, prompts: PromptSet) -> dict[int, int]:
    """Return the expected tokens by line after an iteration whose samples are all scored."""
    trained = [
        (prompts.prompt(*sample.origin).line, len(sample.response)) for sample in ledger.samples if not sample.left_out
    ]
    cut = {prompts.prompt(*sample.origin).line for sample in ledger.samples if sample.state is SampleState.CUT}
    return learned_lengths(before, trained, sorted(cut))


def learned_lengths(
    before: Mapping[int, int], trained: Sequence[tuple[int, int]], cut: Sequence[int] = ()
) -> dict[int, int]:
    """Return the expected tokens by line of the prompt file after an iteration.

    `before`: those before it. `trained`: (line, response tokens) of each trained sample; their mean counts half beside
    an earlier expectation. `cut`: lines of prompts that oversampling cut off; they count at least as long as the
    longest trained prompt.
    """
    after, lengths = dict(before), dict[int, list[int]]()
    for line, tokens in trained:
        lengths.setdefault(line, []).append(tokens)
    means = {line: round(statistics.fmean(tokens)) for line, tokens in lengths.items()}
    for line, mean in means.items():
        after[line] = (before.get(line, mean) + mean) // 2
    for line in cut if means else ():
        after[line] = max(before.get(line, 0), *means.values())
    return after


def lengths_message(lengths: Mapping[int, int]) -> PromptLengths:
    """Return expected tokens by line in the journal's form."""
    lines = sorted(lengths)
    return PromptLengths(lines=lines, tokens=[lengths[line] for line in lines])


def lengths_of(message: PromptLengths) -> dict[int, int]:
    """Return the expected tokens by line in the journal's form. Raises ValueError if the lists do not match."""
    return dict(zip(message.lines, message.tokens, strict=True))
