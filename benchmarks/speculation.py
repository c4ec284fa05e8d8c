"""Measures the gain of drafts on the torch engine: tokens per second without, with each fixed length, and with Auto.

    python benchmarks/speculation.py --no-unpaced --json     # the whole grid at a fixed pace
    python benchmarks/speculation.py --json [--batches 1 2 4 ... 256] [--fixed 1 ... 8] [--acceptance 0.3 0.6 0.9]
        [--long-answers FOLDER] [--step 0.01 --row 0.00005]

An engine in this process decodes with two kinds of drafts. `known` uses a drafter that knows the responses of a small
random policy and drafts each token correctly with a given probability. `siblings` uses a job's own drafters on groups
of eight answers of a policy trained to give long, repetitive ones (FOLDER: the output of the long-answers example's
prepare.py). Each runs twice: `unpaced`, at this machine's speed, and `paced`, where a pass takes at least --step
seconds and --row more for every row, as on a memory-bound device. The real time of choosing and drafting is added.

All ways decode the same samples in turn, round after round, with another one first in each, because the first finds
different caches. Every way must generate the same tokens. Only Auto runs --warm rounds before, from which it learns as
from an earlier iteration. At the end comes a table for the documentation: by drafts and batch, the best fixed length
(or none) and Auto.

Reported are medians over rounds of tokens per second and of the ratio to Disabled in the same round. Paced runs are
compared by the clock, unpaced runs by processor seconds, which are steadier on a shared machine; Auto uses the clock in
both. `regret` is Auto's loss against the best fixed length, including none. `late` is the share of paced passes that
took longer than their pace. The last line of --json is one object.
"""

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.known_responses import KnownResponses
from benchmarks.paced_worker import Pacer, StepPace, pace_workers

from rlhf_api.job import RLHFJob
from rlhf_api.job.groups import DRAFTERS
from rlhf_common.samples import SampleKey, SampleRequest, TokenArray
from rlhf_workers.devices.device import device_name
from rlhf_workers.generation.speculation.drafter import Drafter, PromptGroup
from rlhf_workers.generation.speculation.drafter_registry import build_drafters
from rlhf_workers.generation.speculation.speculator import Speculator
from rlhf_workers.generation.torch_engine.buckets import pass_widths
from rlhf_workers.generation.torch_engine.build import build_engine
from rlhf_workers.generation.torch_engine.engine import TorchEngine
from rlhf_workers.models.loading import load_tokenizer

Responses = dict[int, list[int]]
"""Sample -> tokens."""

CPU: Final = torch.device("cpu")
VOCABULARY: Final = 256
GROUP: Final = 8
"""Number of samples per prompt."""
DISABLED: Final = "Disabled"
AUTO: Final = "Auto"
TOLERATED: Final = 0.03
"""Loss of Auto against the best fixed length that is not highlighted."""


class Bench(NamedTuple):
    """An engine and its input."""

    engine: TorchEngine
    tokenizer: Any
    job: RLHFJob
    prompts: list[TokenArray]


class DecodingTime(NamedTuple):
    """Time of decoding the samples."""

    seconds: float
    cpu_seconds: float


def write_policy(folder: Path, layers: int) -> None:
    """Write a random Llama with hidden size 64, and a tokenizer without an end-of-sequence token."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    words = {"<pad>": 0} | {f"w{number}": number for number in range(1, VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>").save_pretrained(folder)


def bench_of(folder: Path, prompts: Sequence[str], arguments: argparse.Namespace) -> Bench:
    """Return an engine of the policy in a folder, without drafting at first."""
    spec = {
        "algorithm": {"grpo": {"groupSize": GROUP}},
        "deterministic": arguments.deterministic,
        "models": {"actor": {"path": str(folder)}, "reward": {"function": {"file": "reward.py"}}},
        "prompts": {"path": "prompts.jsonl"},
        "rollout": {"batchSize": 512, "maxPromptTokens": 16, "maxResponseTokens": arguments.response},
        "generation": {"engine": "torch", "maxBatchSize": max(arguments.batches), "speculation": {"mode": "Disabled"}},
    }
    whole = {"apiVersion": "rlhf.dev/v1alpha1", "kind": "RLHFJob", "metadata": {"name": "drafts"}, "spec": spec}
    job = RLHFJob.model_validate(whole)
    tokenizer = load_tokenizer(str(folder), "policy")
    responses = [np.array(tokenizer(text)["input_ids"], np.int32) for text in prompts]
    return Bench(build_engine(job.spec, tokenizer, CPU), tokenizer, job, responses)


def samples_of(bench: Bench, batch: int, arguments: argparse.Namespace) -> list[SampleRequest]:
    """Return groups of samples. Large batches have shorter responses, which bounds their time."""
    random = np.random.default_rng(batch)
    longest = min(arguments.response, max(arguments.shortest, arguments.rows // batch))
    return [
        SampleRequest(
            SampleKey(0, number, 0),
            bench.prompts[number // GROUP % len(bench.prompts)],
            int(random.integers(2**63)),
            longest,
        )
        for number in range(batch)
    ]


def speculator(bench: Bench, drafters: Sequence[Drafter], length: int, *, fixed: bool) -> Speculator:
    """Return a speculator with these drafters that drafts always, or at most, `length` tokens."""
    most = bench.engine.limits.max_batch_size * (length + 1)
    widths = pass_widths(most, tiled=bench.engine.deterministic, static=False)
    return Speculator(drafters, mode="Fixed" if fixed else "Auto", longest=length, widths=widths)


def decode(
    engine: TorchEngine, samples: Sequence[SampleRequest], wanted: Responses | None
) -> tuple[Responses, DecodingTime]:
    """Return the responses and the time. Raises SystemExit unless the responses are `wanted`."""
    responses: Responses = {}
    began, cpu = time.perf_counter(), time.process_time()
    engine.submit(samples)
    while engine.in_flight:
        for response in engine.step().finished:
            responses[response.key.sample] = response.tokens.tolist()
    taken = DecodingTime(time.perf_counter() - began, time.process_time() - cpu)
    if wanted is not None and responses != wanted:
        raise SystemExit("drafts changed a token")
    return responses, taken


def compare(bench: Bench, acceptance: float | None, batch: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Compare no drafts, fixed lengths and Auto at one batch size and acceptance (None: the job's own drafters)."""
    engine, samples = bench.engine, samples_of(bench, batch, arguments)
    responses, _ = decode(engine, samples, None)

    def drafters() -> Sequence[Drafter]:
        if acceptance is None:
            return build_drafters(DRAFTERS, bench.job.spec, bench.tokenizer, CPU)
        return [KnownResponses(acceptance, responses, engine.vocabulary)]

    ways: dict[str, Speculator | None] = {DISABLED: None}
    for length in arguments.fixed:
        ways[f"Fixed {length}"] = speculator(bench, drafters(), length, fixed=True)
    ways[AUTO] = speculator(bench, drafters(), max(arguments.fixed), fixed=False)
    groups = {PromptGroup.for_sample(sample.key, GROUP) for sample in samples}
    taken: list[dict[str, DecodingTime]] = []
    for number in range(arguments.warm + arguments.rounds):
        times = {}
        turn = number % len(ways)
        for name, way in [*ways.items()][turn:] + [*ways.items()][:turn]:
            if number < arguments.warm and name != AUTO:
                continue  # it learns nothing
            engine.draft_by(way)
            times[name] = decode(engine, samples, responses)[1]
            engine.draft_by(None)
            if way is not None:
                for group in groups:
                    way.forget(group)  # otherwise the next round would be drafted from memory
        if number >= arguments.warm:
            taken.append(times)
    return figures(ways, taken, sum(map(len, responses.values())))


def figures(
    ways: Mapping[str, Speculator | None], taken: Sequence[Mapping[str, DecodingTime]], tokens: int
) -> dict[str, Any]:
    """Return the results of every way."""
    result: dict[str, Any] = {}
    for name, way in ways.items():
        result[name] = {
            "tokens_per_second": _median([tokens / times[name].seconds for times in taken]),
            "of_disabled": _median([times[DISABLED].seconds / times[name].seconds for times in taken]),
            "of_disabled_by_cpu": _median([times[DISABLED].cpu_seconds / times[name].cpu_seconds for times in taken]),
        }
        if way is not None:
            totals = way.totals
            drafted, accepted = int(totals.drafted.sum()), int(totals.accepted.sum())
            result[name] |= {
                "acceptance": round(accepted / max(1, drafted), 3),
                "tokens_per_sample_step": round(totals.tokens / max(1, totals.samples), 3),
                "budget": round(drafted / max(1, totals.samples), 3),
            }
    return result


def beside_the_best(ways: Mapping[str, Any], by: str) -> dict[str, Any]:
    """Return Auto's loss against the best fixed length, and its gain over no drafts."""
    best = max((name for name in ways if name != AUTO), key=lambda name: ways[name][by])
    auto = ways[AUTO][by]
    return {"best": best, "best_of_disabled": ways[best][by], "auto_of_disabled": auto,
            "regret": round(1 - auto / ways[best][by], 4)}  # fmt: skip


def run(folder: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Run all measurements, bucket by bucket."""
    write_policy(folder / "policy", arguments.layers)
    random = np.random.default_rng(0)
    texts = [" ".join(f"w{word}" for word in random.integers(1, VOCABULARY, 8)) for _ in range(32)]
    kinds: list[tuple[str, Bench, float | None]] = []
    known_bench = bench_of(folder / "policy", texts, arguments)
    kinds += [(f"known {probability}", known_bench, probability) for probability in arguments.acceptance]
    if arguments.long_answers is not None:
        lines = (arguments.long_answers / "prompts.jsonl").read_text().splitlines()
        asked = [str(json.loads(line)["prompt"]) for line in lines]
        kinds.append(("siblings", bench_of(arguments.long_answers / "policy", asked, arguments), None))
    result = []
    pace = StepPace(arguments.step, arguments.row, 0.0, 0.0, 0.0)
    pacer: Pacer | None = None
    for paced in (False, True) if arguments.unpaced else (True,):
        if paced:
            pacer = pace_workers(pace)  # last, because pacing cannot be undone
        for kind, bench, probability in kinds:
            for batch in arguments.batches:
                if pacer is not None:
                    pacer.done = pacer.late = 0
                ways = compare(bench, probability, batch, arguments)
                beside = beside_the_best(ways, "of_disabled" if paced else "of_disabled_by_cpu")
                bucket = {"drafts": kind, "batch": batch, "paced": paced, **beside, "ways": ways}
                if pacer is not None:
                    bucket["late"] = round(pacer.late / max(1, pacer.done), 3)
                result.append(bucket)
                print(json.dumps({name: value for name, value in bucket.items() if name != "ways"}), flush=True)
    return result


def table(buckets: Sequence[Mapping[str, Any]]) -> str:
    """Return Markdown rows: best fixed length and Auto relative to no drafts; bold if Auto loses over TOLERATED."""
    batches = sorted({int(bucket["batch"]) for bucket in buckets})
    lines = ["| drafts | " + " | ".join(map(str, batches)) + " |", "|---" * (len(batches) + 1) + "|"]
    kinds = dict.fromkeys((str(bucket["drafts"]), bool(bucket["paced"])) for bucket in buckets)
    for kind, paced in kinds:
        row = {
            int(bucket["batch"]): _cell(bucket)
            for bucket in buckets
            if (bucket["drafts"], bucket["paced"]) == (kind, paced)
        }
        lines.append(
            f"| {kind}, {'paced' if paced else 'unpaced'} | " + " | ".join(row[each] for each in batches) + " |"
        )
    return "\n".join(lines)


def _cell(bucket: Mapping[str, Any]) -> str:
    best = "none" if bucket["best"] == DISABLED else str(bucket["best"]).removeprefix("Fixed ")
    auto = f"{bucket['auto_of_disabled']:.2f}"
    return f"{bucket['best_of_disabled']:.2f} ({best}), {f'**{auto}**' if bucket['regret'] > TOLERATED else auto}"


def _median(values: Sequence[float]) -> float:
    return round(statistics.median(values), 3)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 2, 4, 8, 16, 32, 64, 128, 256])
    parser.add_argument("--acceptance", type=float, nargs="*", default=[0.3, 0.6, 0.9])
    parser.add_argument("--fixed", type=int, nargs="*", default=[1, 2, 3, 4, 5, 6, 7, 8])
    parser.add_argument("--long-answers", type=Path, help="folder with policy and prompts.jsonl")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--warm", type=int, default=2, help="rounds of Auto before, from which it learns")
    parser.add_argument("--response", type=int, default=96, help="longest response, in tokens")
    parser.add_argument("--shortest", type=int, default=24, help="of responses of large batches")
    parser.add_argument("--rows", type=int, default=3072, help="tokens of a batch, where responses are between the two")
    parser.add_argument("--step", type=float, default=0.01, help="seconds of a paced pass")
    parser.add_argument("--row", type=float, default=5e-5, help="seconds of a row of a paced pass")
    parser.add_argument(
        "--unpaced", action=argparse.BooleanOptionalAction, default=True, help="as this machine decodes"
    )
    parser.add_argument("--layers", type=int, default=2, help="of the random policy")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--deterministic", action="store_true", help="tiles that give the same bits for every batch")
    parser.add_argument("--json", action="store_true", help="print one object as the last line")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    torch.set_num_threads(arguments.threads)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        buckets = run(Path(name), arguments)
    print(table(buckets))
    if arguments.json:
        names = ("threads", "rounds", "response", "fixed", "step", "row", "deterministic")
        machine = {"device": device_name(CPU), "machine": platform.machine(), "took": round(time.monotonic() - began)}
        print(json.dumps(machine | {name: getattr(arguments, name) for name in names} | {"buckets": buckets}))


if __name__ == "__main__":
    main()
