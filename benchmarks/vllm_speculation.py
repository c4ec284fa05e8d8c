"""Measures the gain and cost of drafts on vLLM: tokens per second without, with fixed lengths and with Auto, by batch.

    python benchmarks/vllm_speculation.py --json [--batches 1 4 16 64] [--acceptance 0.3 0.6 0.9] [--fixed 1 2 4 8]

One engine of vLLM in this process has a random Llama in float32 with 10.6 million parameters. In each of two parts all
ways decode the same samples in turn, round after round, and every way must generate the same tokens:

- `gains`: a drafter knows the response and drafts each token correctly with the given probability, so that acceptance
  is configured. Ways: Disabled, Fixed of each length, Auto.
- `zero`: the cost of not drafting. Disabled; Auto with the drafters of a job on text that does not repeat, where none
  of them is useful; and a second engine, built with vLLM's `custom_class` speculation and a class that drafts nothing.

The first round is a warm-up, from which Auto learns. Reported are medians over rounds of tokens per second by the
clock, of the ratio to Disabled in the same round, and of both by processor seconds, which are steadier on a shared
machine (and equal the clock if a way has the machine for itself, with one thread). Auto learns by the clock, as in a
job, or with `--learn-by processor` by processor seconds: on a machine with more load than cores, a step's clock time
says little about the step. The last line of --json is one object.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from unittest import mock

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.engines import VOCABULARY, write_policy
from benchmarks.known_responses import KnownResponses
from benchmarks.timed_decoding import DecodingTime, decode

from rlhf_api.job import RLHFJob
from rlhf_common.samples import SampleKey, SampleRequest, TokenArray
from rlhf_workers.devices.device import device_name
from rlhf_workers.generation.engine_registry import build_engine
from rlhf_workers.generation.speculation.drafter_registry import build_drafters
from rlhf_workers.generation.speculation.speculator import Speculator
from rlhf_workers.generation.vllm_engine import build as vllm_build
from rlhf_workers.generation.vllm_engine import drafting
from rlhf_workers.generation.vllm_engine import engine as vllm_engine
from rlhf_workers.generation.vllm_engine.engine import VllmEngine
from rlhf_workers.models.loading import load_tokenizer

CPU: Final = torch.device("cpu")
PROMPT: Final = 16
DISABLED: Final = "Disabled"
AUTO: Final = "Auto"
BUILT: Final = "built to speculate, nothing drafted"


class NoDrafts:
    """A proposer for vLLM's `custom_class`."""

    def __init__(self, config: object) -> None:
        """Called by vLLM."""

    def load_model(self, model: object) -> None:
        """See vLLM."""

    def propose(self, sampled: Sequence[Sequence[int]], *arguments: object, **named: object) -> list[list[int]]:
        """See vLLM."""
        return [[] for _ in sampled]


def build(folder: Path, arguments: argparse.Namespace, **engine_args: Any) -> VllmEngine:
    """Return an engine without drafting at first."""
    job = _job(folder, arguments, engine_args)
    with mock.patch.object(
        vllm_build, "speculation_arguments", lambda arguments, *_: arguments
    ):  # vLLM rejects it on a CPU
        engine = build_engine(job.spec, load_tokenizer(str(folder), "policy"), CPU)
    assert isinstance(engine, VllmEngine)
    return engine


def _job(folder: Path, arguments: argparse.Namespace, engine_args: Mapping[str, Any]) -> RLHFJob:
    generation = {
        "engine": "vllm",
        "maxBatchSize": max(arguments.batches),
        "engineArgs": dict(engine_args),
        "speculation": {"mode": "Disabled"},
    }
    spec = {
        "algorithm": {"grpo": {}},
        "models": {"actor": {"path": str(folder)}, "reward": {"function": {"file": "reward.py"}}},
        "prompts": {"path": "prompts.jsonl"},
        "rollout": {"maxPromptTokens": PROMPT, "maxResponseTokens": arguments.response},
        "generation": generation,
    }
    whole = {"apiVersion": "rlhf.dev/v1alpha1", "kind": "RLHFJob", "metadata": {"name": "drafts"}, "spec": spec}
    return RLHFJob.model_validate(whole)


def samples_of(batch: int, response: int) -> list[SampleRequest]:
    """Return samples of one length, each with its own prompt and key."""
    random = np.random.default_rng(batch)
    return [
        SampleRequest(SampleKey(0, number, 0), _prompt(random), int(random.integers(2**63)), response)
        for number in range(batch)
    ]


def _prompt(random: np.random.Generator) -> TokenArray:
    return random.integers(1, VOCABULARY, PROMPT).astype(np.int32)


def compare(
    ways: Mapping[str, tuple[VllmEngine, Speculator | None]], samples: Sequence[SampleRequest], rounds: int
) -> dict[str, dict[str, float]]:
    """Run all ways on the same samples, in turn."""
    engine, _ = ways[DISABLED]
    wanted, _ = decode(engine, samples, None)
    tokens = sum(len(response) for response in wanted.values())
    taken: list[dict[str, DecodingTime]] = []
    for number in range(rounds + 1):
        times = {}
        for name, (engine, speculator) in ways.items():
            engine.draft_by(speculator)
            times[name] = decode(engine, samples, wanted)[1]
            engine.draft_by(None)
        if number:
            taken.append(times)
    figures: dict[str, dict[str, float]] = {
        name: {
            "tokens_per_second": _median(tokens / times[name].seconds for times in taken),
            "of_disabled": _median(times[DISABLED].seconds / times[name].seconds for times in taken),
            "tokens_per_cpu_second": _median(tokens / times[name].cpu_seconds for times in taken),
            "of_disabled_by_cpu": _median(times[DISABLED].cpu_seconds / times[name].cpu_seconds for times in taken),
        }
        for name in ways
    }
    for name, (_, speculator) in ways.items():
        if speculator is not None:
            drafted, accepted = int(speculator.totals.drafted.sum()), int(speculator.totals.accepted.sum())
            steps = max(1, speculator.totals.steps)
            figures[name] |= {"drafted": drafted, "accepted": accepted}
            figures[name] |= {"steps_that_drafted": round(1 - speculator.totals.by_budget[0] / steps, 3)}
    return figures


def gains(engine: VllmEngine, batch: int, acceptance: float, arguments: argparse.Namespace) -> dict[str, Any]:
    """Compare no drafts, fixed lengths and Auto at one batch size and acceptance."""
    samples = samples_of(batch, arguments.response)
    responses, _ = decode(engine, samples, None)
    widths = engine.draft_widths
    ways: dict[str, tuple[VllmEngine, Speculator | None]] = {DISABLED: (engine, None)}
    for length in arguments.fixed:
        drafter = KnownResponses(acceptance, responses, VOCABULARY)
        ways[f"Fixed {length}"] = engine, Speculator([drafter], mode="Fixed", longest=length, widths=widths)
    drafter = KnownResponses(acceptance, responses, VOCABULARY)
    ways[AUTO] = engine, Speculator([drafter], mode="Auto", longest=max(arguments.fixed), widths=widths)
    figures = compare(ways, samples, arguments.rounds)
    best = max(figure["of_disabled_by_cpu"] for name, figure in figures.items() if name != AUTO)
    of_best = round(figures[AUTO]["of_disabled_by_cpu"] / best, 3)
    return {"batch": batch, "acceptance": acceptance, "ways": figures, "auto_of_best_by_cpu": of_best}


def zero(engine: VllmEngine, built: VllmEngine, batch: int, folder: Path, arguments: argparse.Namespace) -> Any:
    """Measure the cost of not drafting at one batch size."""
    spec = _job(folder, arguments, {}).spec
    drafters = build_drafters(("Siblings", "Ngram"), spec, load_tokenizer(str(folder), "policy"), CPU)
    auto = Speculator(drafters, mode="Auto", longest=8, widths=engine.draft_widths)
    ways = {DISABLED: (engine, None), AUTO: (engine, auto), BUILT: (built, None)}
    return {"batch": batch, "ways": compare(ways, samples_of(batch, arguments.response), arguments.rounds)}


def _median(values: Iterable[float]) -> float:
    return round(statistics.median(values), 3)


def run(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run all measurements."""
    write_policy(folder, arguments.layers)
    engine = build(folder, arguments)
    result: dict[str, Any] = {"zero": [], "gains": []}
    if arguments.zero:
        drafts_nothing = f"{NoDrafts.__module__}.{NoDrafts.__name__}".replace("__main__", "benchmarks.vllm_speculation")
        speculates = {"method": "custom_class", "model": drafts_nothing, "num_speculative_tokens": 8}
        built = build(folder, arguments, speculative_config=speculates)
        for batch in arguments.batches:
            result["zero"].append(zero(engine, built, batch, folder, arguments))
            print("zero", json.dumps(result["zero"][-1]), flush=True)
    for acceptance in arguments.acceptance:
        for batch in arguments.batches:
            result["gains"].append(gains(engine, batch, acceptance, arguments))
            print("gains", json.dumps(result["gains"][-1]), flush=True)
    engine.close()  # for the whole process: vLLM's group of ranks is gone with it
    return result


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--acceptance", type=float, nargs="*", default=[0.3, 0.6, 0.9])
    parser.add_argument("--fixed", type=int, nargs="*", default=[1, 2, 4, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--response", type=int, default=128)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--learn-by", choices=("clock", "processor"), default="clock", help="seconds that Auto sees")
    parser.add_argument("--zero", action=argparse.BooleanOptionalAction, default=True, help="what not drafting costs")
    parser.add_argument("--json", action="store_true", help="print one object as the last line")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    if arguments.learn_by == "processor":
        mock.patch.object(vllm_engine, "perf_counter_ns", time.process_time_ns).start()
        mock.patch.object(drafting, "perf_counter", time.process_time).start()
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as name:
        result = run(Path(name), arguments)
    if arguments.json:
        names = ("threads", "rounds", "response", "layers", "fixed", "learn_by")
        machine = {"device": device_name(CPU), "machine": platform.machine()}
        print(json.dumps(machine | {name: getattr(arguments, name) for name in names} | result))


if __name__ == "__main__":
    main()
