"""Responses that were recorded, gone through again: what drafters are accepted of is what was accepted as they ran."""

from dataclasses import replace

import numpy as np
import pytest
from benchmarks.recorded_responses import RecordedResponse
from benchmarks.replay_drafts import replay
from tests.support.engine_driving import MakeEngine, finish, requests

from rlhf_api.samples import SampleKey, SampleRequest
from rlhf_workers.generation.speculation.drafter import Drafter
from rlhf_workers.generation.speculation.ngram import NgramDrafter
from rlhf_workers.generation.speculation.siblings import SiblingsDrafter
from rlhf_workers.generation.speculation.speculator import Speculator

GROUP = 6
SLOTS = 8
LONGEST = 5


def groups() -> list[SampleRequest]:
    """Four prompts, GROUP samples each, of different lengths."""
    return [
        replace(
            prompt, key=SampleKey(0, GROUP * number + sibling, 0), random_key=100 * number + sibling,
            max_response_tokens=40 + 8 * sibling,
        )
        for number, prompt in enumerate(requests(4, seed=9, response=96))
        for sibling in range(GROUP)
    ]  # fmt: skip


@pytest.mark.parametrize("make", [NgramDrafter, lambda: SiblingsDrafter(GROUP, 64, 96)], ids=["Ngram", "Siblings"])
def test_offline_acceptance_is_the_live_one(make_engine: MakeEngine, make: type[Drafter]) -> None:
    samples = groups()
    engine = make_engine("llama", slots=SLOTS, temperature=0.1, response_tokens=96)
    widths = np.arange(1 + SLOTS * (1 + LONGEST), dtype=np.int64)
    live = Speculator([make()], mode="Fixed", longest=LONGEST, widths=widths)
    engine.draft_by(live)
    done = finish(engine, samples)
    recorded = [RecordedResponse(sample, done[sample.key.sample].tokens, 1) for sample in samples]
    offline = replay(recorded, make(), longest=LONGEST, slots=SLOTS)
    shares = [float(totals.accepted.sum() / totals.drafted.sum()) for totals in (live.totals, offline)]
    assert live.totals.accepted.sum() > 100, "there is something to compare"
    assert shares[1] == pytest.approx(shares[0], rel=0.1)
    assert offline.tokens / offline.samples == pytest.approx(live.totals.tokens / live.totals.samples, rel=0.1)
    print(shares)
