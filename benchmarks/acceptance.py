"""Acceptance of siblings, earlier epochs, n-gram and draft model side by side, as it drifts over the training of a job.

    python -m benchmarks.acceptance --runs runs/acceptance --iterations 18 --json

Trains the quickstart (GRPO) and the long answers with drafts by siblings of a fixed length, unless --runs holds their
run folders already, and then goes through what was recorded: at a few iterations, each drafter alone, with the same
responses. "Earlier" is the siblings drafter that knows only what earlier epochs said to the prompt, "All" the one of a
job, which knows both. The job asks for few prompts, so that it comes back to them. Acceptance is accepted over drafted
tokens. "live" is what the job itself measured for its siblings, "offline" what the replay says of the same iteration,
without earlier epochs and with them. The draft model is the example's, or one that was taught the responses of the
first iteration that is recorded, which says nothing of that one. One object on the last line of --json.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from benchmarks.recorded_responses import RecordedResponse, RecordedRun
from benchmarks.replay_drafts import ReplayedIteration, replay, teach_earlier
from examples.quickstart.prepare import build_policy, teach

from rlhf_api.job import RLHFJobSpec
from rlhf_api.samples import SampleKey, SampleRequest, TokenArray
from rlhf_workers.generation.speculation.drafter import Drafter, LearnsSiblings
from rlhf_workers.generation.speculation.drafter_registry import build_drafters
from rlhf_workers.generation.speculation.siblings import SiblingsDrafter
from rlhf_workers.generation.speculation.vocabulary import policy_vocabulary
from rlhf_workers.models.loading import load_tokenizer

ROOT: Final = Path(__file__).resolve().parents[1]
TASKS: Final = {"quickstart": 48, "long_answers": 24}
"""Folder of the example -> prompts that the job is given."""
LONGEST: Final = 4
"""Tokens of a draft, in a job that is run for this."""
LOOKS: Final = 4
"""Iterations that are gone through, spread over those recorded."""
MODEL_SAMPLES: Final = 16
"""Of an iteration, for which the draft model drafts: its passes take longer than all the rest together."""
TAUGHT_STEPS: Final = 150
"""Of a draft model that an example does not bring."""


@dataclass(frozen=True)
class LiveAgainstOffline:
    """One iteration's acceptance of siblings, as the job measured it and as the replay says it was."""

    iteration: int
    live: float
    siblings: float
    """By the replay, where nothing of earlier epochs was known."""
    all: float
    """By the replay, where all of earlier epochs was known from the start; in a job it comes while it decodes."""


class OnlyTaught(SiblingsDrafter):
    """Knows what it was taught, and nothing of what is drawn now."""

    def begin(self, request: SampleRequest) -> None:
        """Take no note."""

    def extend(self, key: SampleKey, tokens: TokenArray) -> None:
        """Take no note."""


def record(task: str, folder: Path, iterations: int) -> Path:
    """Return the run folder of a job on this task, which is run if it is not there."""
    run, example = folder / task, ROOT / "examples" / task
    if (run / "summary.json").is_file():
        return run
    python = [sys.executable]
    subprocess.run([*python, str(example / "prepare.py")], check=True, stdout=subprocess.DEVNULL)
    prompts = folder / f"{task}.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    lines = (example / "assets" / "prompts.jsonl").read_text().splitlines(keepends=True)
    prompts.write_text("".join(lines[: TASKS[task]]))
    settings = [
        f"spec.iterations={iterations}",
        f"spec.prompts.path={prompts.resolve()}",
        "spec.rollout.batchSize=64",
        "spec.generation.maxBatchSize=16",
        f"spec.generation.speculation.maxTokens={LONGEST}",
        "spec.generation.speculation.mode=Fixed",
        "spec.generation.speculation.drafters=[Siblings]",
        f"spec.checkpoints.path={(run / 'checkpoints').resolve()}",
        "spec.checkpoints.every=1",
        "spec.checkpoints.keep=1000",
    ]
    rlhf = [str(Path(sys.executable).with_name("rlhf")), "run", str(example / "grpo.yaml"), "--run-dir", str(run)]
    sets = [part for setting in settings for part in ("--set", setting)]
    subprocess.run([*rlhf, *sets], check=True, stdout=subprocess.DEVNULL)
    return run


def draft_model(run: RecordedRun, task: str, folder: Path) -> Path:
    """Return the folder of a small model that drafts for this task."""
    brought = ROOT / "examples" / task / "assets" / "draft"
    made = folder / f"{task}-draft"
    if brought.is_dir() or made.is_dir():
        return brought if brought.is_dir() else made
    tokenizer = load_tokenizer(run.job.spec.models.actor.path, "spec.models.actor.path")
    samples = run.samples(run.iterations()[0])

    def lessons() -> Iterator[tuple[torch.Tensor, torch.Tensor, float]]:
        pad = torch.nn.utils.rnn.pad_sequence
        rows = [torch.tensor([*each.request.prompt, *each.response]) for each in samples]
        labels = [torch.tensor([-100] * len(each.request.prompt) + [*each.response]) for each in samples]
        for step in range(TAUGHT_STEPS):
            yield pad(rows, True, 0), pad(labels, True, -100), 4e-3 * (1 - step / TAUGHT_STEPS)

    torch.manual_seed(0)
    model = build_policy(tokenizer, 64, 32, layers=1)
    teach(model, lessons(), lambda loss: None)
    model.save_pretrained(made)
    tokenizer.save_pretrained(made)
    return made


def drafters(run: RecordedRun, model: Path) -> dict[str, Drafter]:
    """Return what is compared, each fresh."""
    fields = run.job.spec.model_dump(by_alias=True, exclude_none=True)
    fields["generation"]["maxBatchSize"] *= run.job.spec.generation.replicas  # all are gone through by one drafter
    fields["generation"]["speculation"] |= {"drafters": ["Model"], "draftModel": {"path": str(model)}}
    spec = RLHFJobSpec.model_validate(fields)
    tokenizer = load_tokenizer(spec.models.actor.path, "spec.models.actor.path")
    siblings, everything, ngram, small = build_drafters(
        ["Siblings", "Siblings", "Ngram", "Model"], spec, tokenizer, torch.device("cpu")
    )
    taught = OnlyTaught(run.samples_per_prompt, policy_vocabulary(spec), spec.rollout.max_response_tokens)
    return {"Siblings": siblings, "Earlier": taught, "All": everything, "Ngram": ngram, "Model": small}


def compare(
    run: RecordedRun, iteration: int, model: Path, earlier: Sequence[RecordedResponse]
) -> list[ReplayedIteration]:
    """Return what each drafter gets accepted of an iteration."""
    samples = sorted(run.samples(iteration), key=lambda each: each.request.key.sample % run.samples_per_prompt)
    spec = run.job.spec
    slots = spec.generation.replicas * spec.generation.max_batch_size
    found = []
    for name, drafter in drafters(run, model).items():
        if name in ("Earlier", "All") and isinstance(drafter, LearnsSiblings):
            teach_earlier(drafter, samples, earlier, run.samples_per_prompt)
        chosen = samples[:MODEL_SAMPLES] if name == "Model" else samples
        totals = replay(chosen, drafter, longest=spec.generation.speculation.max_tokens, slots=slots)
        found.append(ReplayedIteration.of(name, iteration, totals))
    return found


def live(folder: Path) -> dict[int, float]:
    """Return iteration -> acceptance of siblings as the job measured it."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    name = "speculation/acceptance_siblings"
    return {int(line["iteration"]): line[name] for line in lines if name in line}


def measure(task: str, folder: Path, iterations: int) -> dict[str, Any]:
    """Return all figures of a task, printed for people as they come."""
    where = record(task, folder, iterations)
    run, measured = RecordedRun(where), live(where)
    there = run.iterations()
    model = draft_model(run, task, folder)
    looks = sorted({there[round(at * (len(there) - 1) / (LOOKS - 1))] for at in range(LOOKS)})
    found: list[ReplayedIteration] = []
    pairs: list[LiveAgainstOffline] = []
    for iteration in looks:
        earlier = [each for at in there if at < iteration for each in run.samples(at)]
        compared = compare(run, iteration, model, earlier)
        found += compared
        if iteration in measured:
            pairs.append(LiveAgainstOffline(iteration, measured[iteration], compared[0].share, compared[2].share))
        for each in compared:
            print(f"{task:13} {each.summary}", flush=True)
    for pair in pairs:
        offline = f"offline {pair.siblings:.1%} to {pair.all:.1%}"
        print(f"{task:13} iteration {pair.iteration:4}  live {pair.live:.1%}, {offline}")
    shares = [asdict(each) | {"share": each.share} for each in found]
    longest = run.job.spec.generation.speculation.max_tokens
    return {"task": task, "longest": longest, "acceptance": shares, "live": [asdict(pair) for pair in pairs]}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/acceptance"), help="folder of the run folders")
    parser.add_argument("--iterations", type=int, default=18)
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    tasks = [measure(task, arguments.runs, arguments.iterations) for task in arguments.tasks]
    machine = {"machine": platform.processor() or platform.machine(), "cpus": os.cpu_count()}
    if arguments.json:
        print(json.dumps({"machine": machine, "tasks": tasks}))


if __name__ == "__main__":
    main()
