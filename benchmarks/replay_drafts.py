"""What drafters would have been accepted of on responses that a run recorded, without decoding anything again.

    python -m benchmarks.replay_drafts RUN --drafters Siblings,Ngram --longest 8 --json

RUN is the folder of `rlhf run`. Each iteration is gone through as a worker decodes it: samples are taken in turn into
as many slots as the job's generation workers have together, every step drafts for all of them (mode Fixed), what equals
the recorded response is accepted, and one token more is drawn. One drafter is asked at a time. Acceptance is accepted
over drafted tokens; tokens per step are those of one sample. With --earlier, responses of earlier epochs to the same
prompts are taught to the drafter first, as the coordinator keeps and weighs them. The last line of --json is one
object.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.recorded_responses import RecordedResponse, RecordedRun

from rlhf_api.job import RLHFJobSpec
from rlhf_coordinator.state.earlier_responses import EarlierResponse, EarlierResponses
from rlhf_coordinator.state.ledger import interleave_prompt_groups
from rlhf_coordinator.state.sibling_state import weights
from rlhf_workers.generation.speculation.drafter import Drafter, DraftRequest, LearnsSiblings, PromptGroup, SampleSource
from rlhf_workers.generation.speculation.drafter_registry import build_drafters
from rlhf_workers.generation.speculation.speculation_totals import SpeculationTotals
from rlhf_workers.generation.speculation.speculator import Speculator, Verified
from rlhf_workers.models import load_tokenizer


@dataclass(frozen=True)
class ReplayedIteration:
    """What came of the drafts of one drafter over one iteration."""

    drafter: str
    iteration: int
    drafted: int
    accepted: int
    tokens_per_step: float
    """Of a sample."""
    by_position: list[float]
    """Share accepted of those drafted at each position of a draft, with all before them accepted or not."""
    microseconds_per_drafted_token: float

    @property
    def share(self) -> float:
        """Accepted over drafted tokens, NaN where none was drafted."""
        return self.accepted / self.drafted if self.drafted else float("nan")

    @property
    def summary(self) -> str:
        """All of it for people, on one line."""
        return (
            f"iteration {self.iteration:4}  {self.drafter:9} accepted {self.share:6.1%} of {self.drafted:7} drafted, "
            f"{self.tokens_per_step:.2f} tokens per step, {self.microseconds_per_drafted_token:.1f} us per token"
        )

    @classmethod
    def of(cls, drafter: str, iteration: int, totals: SpeculationTotals) -> "ReplayedIteration":
        """Return what totals of one drafter say."""
        drafted, accepted = totals.drafted[0], totals.accepted[0]
        return cls(
            drafter,
            iteration,
            int(drafted.sum()),
            int(accepted.sum()),
            totals.tokens / max(1, totals.samples),
            [round(float(share), 3) for share in accepted / np.maximum(drafted, 1)],
            1e6 * totals.by_drafter_seconds[0] / max(1, int(drafted.sum())),
        )


class _Slot:
    """A sample that is gone through."""

    def __init__(self, sample: RecordedResponse) -> None:
        self.sample = sample
        self.text = np.concatenate([sample.request.prompt, sample.response])
        self.begun = len(sample.request.prompt)
        self.end = self.begun


def replay(samples: Iterable[RecordedResponse], drafter: Drafter, *, longest: int, slots: int) -> SpeculationTotals:
    """Return what came of drafts of at most `longest` tokens over samples, of which `slots` are decoded at a time."""
    waiting = list(samples)[::-1]
    widths = np.arange(1 + slots * (1 + longest), dtype=np.int64)
    speculator = Speculator([drafter], mode="Fixed", longest=longest, widths=widths)
    running: list[_Slot] = []
    while waiting or running:
        while waiting and len(running) < slots:
            slot = _Slot(waiting.pop())
            speculator.begin(slot.sample.request)
            running.append(slot)
        keys = sum(slot.end for slot in running)
        speculator.wants(len(running), keys)
        limits = [slot.sample.request.max_response_tokens - (slot.end - slot.begun) - 1 for slot in running]
        asked = [(slot, min(limit, longest)) for slot, limit in zip(running, limits, strict=True) if limit > 0]
        requests = [
            DraftRequest(slot.sample.request.key, slot.text[: slot.end], slot.begun, limit) for slot, limit in asked
        ]
        drafts = dict(zip((slot for slot, _ in asked), speculator.propose(requests, keys), strict=True))
        outcomes = [_judge(slot, drafts.get(slot, np.empty(0, np.int32)), speculator) for slot in running]
        rows = len(running) + sum(map(len, drafts.values()))
        speculator.verified(outcomes, rows, keys, 0.0, 0.0)
        for slot in [slot for slot in running if slot.end == len(slot.text)]:
            speculator.end(slot.sample.request.key)
            running.remove(slot)
    return speculator.totals


def _judge(slot: _Slot, draft: Any, speculator: Speculator) -> Verified:
    """Move on by what is accepted of a draft and one token more, up to the response's end."""
    rest = slot.text[slot.end : slot.end + len(draft)]
    equal = draft[: len(rest)] == rest
    accepted = int(equal.argmin()) if not equal.all() else len(equal)
    moved = min(accepted + 1, len(slot.text) - slot.end)
    speculator.extend(slot.sample.request.key, slot.text[slot.end : slot.end + moved])
    slot.end += moved
    drafted = accepted if accepted == moved else len(draft)  # nobody asked for what stands behind the end
    return Verified(slot.sample.request.key, drafted, accepted)


def teach_earlier(
    drafter: LearnsSiblings,
    samples: Sequence[RecordedResponse],
    earlier: Iterable[RecordedResponse],
    samples_per_prompt: int,
) -> int:
    """Teach a drafter responses of earlier epochs to the prompts of `samples`, as many and of the weight that a
    coordinator sends with their leases; return how many."""
    store, by_iteration = EarlierResponses(), defaultdict[int, list[RecordedResponse]](list)
    for each in earlier:
        by_iteration[each.request.key.iteration].append(each)
    for iteration in sorted(by_iteration):
        by_prompt = defaultdict[int, list[EarlierResponse]](list)
        for each in by_iteration[iteration]:
            if len(each.response):
                tokens = each.response.astype("<i4").tobytes()
                by_prompt[each.prompt].append(EarlierResponse(iteration, each.request.key.sample, tokens))
        for prompt, responses in by_prompt.items():
            store.add(prompt, responses)
    taught = 0
    for prompt, group in {
        each.prompt: PromptGroup.of(each.request.key, samples_per_prompt) for each in samples
    }.items():
        known = store.of(prompt)
        counts = weights(response.iteration for response in known)
        for response in known:
            source = SampleSource(response.iteration, response.sample)
            text = np.frombuffer(response.tokens, "<i4").astype(np.int32)
            drafter.learn(group, source, 0, text, counts[response.iteration])
            taught += 1
    return taught


def acceptance(
    run: RecordedRun,
    name: str,
    iteration: int,
    *,
    longest: int,
    slots: int | None = None,
    together: bool = False,
    earlier: Sequence[RecordedResponse] = (),
) -> ReplayedIteration:
    """Return what one drafter, built as the job would build it, gets accepted of one iteration."""
    spec = run.job.spec
    tokenizer = load_tokenizer(spec.models.actor.path, "spec.models.actor.path")
    slots = slots or max(1, spec.generation.replicas) * spec.generation.max_batch_size
    fields = spec.model_dump(by_alias=True, exclude_none=True)
    fields["generation"]["maxBatchSize"] = slots  # one drafter goes through all of them
    drafter = build_drafters([name], RLHFJobSpec.model_validate(fields), tokenizer, torch.device("cpu"))[0]
    apart = 1 if together else interleave_prompt_groups(spec)
    samples = sorted(run.samples(iteration), key=lambda each: each.request.key.sample % apart)
    if isinstance(drafter, LearnsSiblings):
        teach_earlier(drafter, samples, earlier, run.samples_per_prompt)
    return ReplayedIteration.of(name, iteration, replay(samples, drafter, longest=longest, slots=slots))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--drafters", default="Siblings,Ngram")
    parser.add_argument("--longest", type=int, default=8, help="tokens of a draft")
    parser.add_argument("--iterations", default="", help="such as 0,10,20; else all that are recorded")
    parser.add_argument("--slots", type=int, help="samples decoded at a time; else those of the job's workers")
    parser.add_argument("--together", action="store_true", help="siblings begin next to each other, not in turns")
    parser.add_argument("--earlier", action="store_true", help="teach responses of earlier epochs first")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    run = RecordedRun(arguments.run)
    there = run.iterations()
    chosen = [int(number) for number in arguments.iterations.split(",") if number] or there
    found = []
    for iteration in chosen:
        if iteration not in there:
            raise SystemExit(f"{arguments.run}: iteration {iteration} is not recorded, only {there}")
        before = [each for at in there if at < iteration for each in run.samples(at)] if arguments.earlier else []
        for name in arguments.drafters.split(","):
            found.append(
                acceptance(
                    run,
                    name,
                    iteration,
                    longest=arguments.longest,
                    slots=arguments.slots,
                    together=arguments.together,
                    earlier=before,
                )
            )
            figure = found[-1]
            print(figure.summary)
    if arguments.json:
        print(json.dumps({"run": str(arguments.run), "acceptance": [asdict(each) for each in found]}))


if __name__ == "__main__":
    main()
