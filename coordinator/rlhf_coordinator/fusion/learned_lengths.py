"""Learning of response lengths, from iterations and after a restart from the stored segments.

Iterations of a sorted window (`spec.prompts.lengthWindow`) are learned together when it ends: each has like lengths, so
one alone would look like a change of the policy. Lost with the process, which reads the segments again.
"""

import logging
from collections.abc import Iterable
from dataclasses import replace

from rlhf_coordinator.job.job_run import JobRun
from rlhf_coordinator.state.carried_sample import origin_in
from rlhf_coordinator.state.fusion_state import FusionState
from rlhf_coordinator.state.sample import ITEM_BYTES
from rlhf_coordinator.storage.batch import finished_responses
from rlhf_coordinator.storage.sample_codec import carried_samples
from rlhf_planner.inter_stage.lengths import WINDOW

log = logging.getLogger(__name__)


def restore_lengths(run: JobRun) -> None:
    """Learn the lengths of the last iterations again, as far as their segments exist: WINDOW, or as many windows."""
    window = run.context.spec.prompts.length_window
    before = [iteration for iteration in run.journal.iterations() if iteration < run.state.iteration]
    remembered = before[-WINDOW * max(1, window) :]
    for iteration in remembered:
        records = run.journal.read(iteration)
        lengths = {
            message.key.sample: len(message.tokens.data) // ITEM_BYTES for message in finished_responses(records)
        }
        carried = carried_samples(records)
        prompts = [run.prompts.prompt(*origin_in(carried, iteration, index)) for index in lengths]
        sizes = [len(prompt.tokens) // ITEM_BYTES for prompt in prompts]
        lines = [prompt.line for prompt in prompts]
        ends = window < 2 or not records or not records[0].begun.waiting
        learn_lengths(run.state.fusion, zip(sizes, lengths.values(), lines, strict=True), ends=ends)
    if remembered:
        log.info("response lengths of %d iterations were restored", len(remembered))


def learn_lengths(fusion: FusionState, samples: Iterable[tuple[int, int, int]], *, ends: bool) -> None:
    """Learn the samples of an iteration: (prompt tokens, response tokens, line) of each.

    `ends`: whether no later iteration belongs to its window. Otherwise its samples wait.
    """
    fusion.window += samples
    if not ends:
        fusion.lengths = replace(fusion.lengths, drifted=False)
        return
    pairs = [(prompt, response) for prompt, response, _ in fusion.window]
    fusion.lengths = fusion.lengths.with_batch(pairs, lines=[line for _, _, line in fusion.window])
    fusion.window = []
