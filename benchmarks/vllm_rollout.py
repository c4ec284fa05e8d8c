"""Shows where vLLM spends the time of a rollout, and the effect of its settings on an offline batch.

    python benchmarks/vllm_rollout.py --json [--settings async priority] [--rounds 3]

Every setting is an engine in a separate process, which decodes one long-tailed batch of a random Llama (no token ends
a response; lengths are fixed) in turns with the reference. The reference is vLLM's core driven step by step, without
output processor and detokenizer, as in the project's engine. Reported for each: the median over rounds of the speed-up
over the reference in the same round, by the clock and by processor seconds, which are steadier on a shared machine.
`parts` are shares of a rollout by computation, of the reference and of plain LLM.generate. The last line of --json is
one object.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import transformers
from benchmarks.vllm_rollout_process import requests_of
from tokenizers import Tokenizer, models

from rlhf_workers.devices.device import device_name

VOCABULARY: Final = 4096
START_SECONDS: Final = 600
"""Time-out for building an engine, including compilation."""


@dataclass(frozen=True)
class Setting:
    """Differences of an engine from the reference."""

    says: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    way: str = "core"
    detokenize: bool = False
    logprobs: int | None = 0


REFERENCE: Final = Setting("the core, step by step: no output processor, no detokenizer, eager")
SETTINGS: Final[Mapping[str, Setting]] = {
    "generate": Setting("LLM.generate with text", way="LLM.generate", detokenize=True, logprobs=None),
    "generate-logprobs": Setting("LLM.generate with text and log-probabilities", way="LLM.generate", detokenize=True),
    "generate-tokens": Setting("LLM.generate without text", way="LLM.generate", logprobs=None),
    "no-logprobs": Setting("no log-probabilities", logprobs=None),
    "async": Setting("async_scheduling", {"async_scheduling": True}),
    "no-chunks": Setting("whole prompts: no chunked prefill", {"enable_chunked_prefill": False}),
    "priority": Setting("scheduling_policy: priority", {"scheduling_policy": "priority"}),
    "no-prefixes": Setting("no prefix caching", {"enable_prefix_caching": False}),
    "statistics": Setting("vLLM's own statistics", {"disable_log_stats": False}),
    "tokens-512": Setting("max_num_batched_tokens: 512", {"max_num_batched_tokens": 512}),
    "tokens-8192": Setting("max_num_batched_tokens: 8192", {"max_num_batched_tokens": 8192}),
    "seqs-16": Setting("max_num_seqs: 16", {"max_num_seqs": 16}),
    "seqs-32": Setting("max_num_seqs: 32", {"max_num_seqs": 32}),
    "compiled": Setting("compiled, as vLLM chooses it", {"enforce_eager": False}),
    "spinning": Setting("threads that spin between operations", environment={"OMP_WAIT_POLICY": "ACTIVE"}),
}


class RolloutEngine:
    """One engine in a process."""

    def __init__(self, setting: Setting, arguments: argparse.Namespace, model: Path, *, parts: bool = False) -> None:
        """Start it; `wait` returns when it is ready."""
        batch = requests_of(arguments.samples, arguments.prompt, arguments.response, VOCABULARY, arguments.seed)
        wanted = {
            "model": str(model),
            "arguments": _engine_arguments(arguments) | dict(setting.arguments),
            "requests": batch,
            "way": setting.way,
            "detokenize": setting.detokenize,
            "logprobs": setting.logprobs,
            "parts": parts,
        }
        script = str(Path(__file__).with_name("vllm_rollout_process.py"))
        self._process = subprocess.Popen(
            [sys.executable, script, json.dumps(wanted)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if arguments.verbose else subprocess.DEVNULL,
            text=True,
            env=os.environ | _environment(arguments) | dict(setting.environment),
        )
        self.start_seconds = float(self._answer()["start_seconds"])

    def run(self) -> dict[str, Any]:
        """Decode the batch once."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._answer()

    def end(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"an engine ended with {self._process.wait()}; --verbose shows what it said")
        return dict(json.loads(line))


def _environment(arguments: argparse.Namespace) -> dict[str, str]:
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": str(arguments.threads),
        "OMP_WAIT_POLICY": "PASSIVE",
    }


def _engine_arguments(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "dtype": "float32",
        "max_model_len": arguments.prompt + arguments.response,
        "max_num_seqs": arguments.samples,
        "max_num_batched_tokens": 2048,
        "kv_cache_memory_bytes": 512 * 2**20,
        "block_size": 32,
        "enforce_eager": True,
        "async_scheduling": False,
        "disable_log_stats": True,
    }


def write_model(folder: Path, arguments: argparse.Namespace) -> None:
    """Write a random Llama with a tokenizer of one word per token."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=arguments.hidden,
        intermediate_size=arguments.hidden * 8 // 3 // 32 * 32,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.hidden // 32,
        num_key_value_heads=arguments.hidden // 64,
        max_position_embeddings=4096,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    words = {"<unk>": 0, "<eos>": 1, "<pad>": 2} | {f" w{number}": number for number in range(3, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>", pad_token="<pad>"
    ).save_pretrained(folder)


def measure(name: str, reference: RolloutEngine, arguments: argparse.Namespace, model: Path) -> dict[str, Any]:
    """Compare a setting with the reference, in turns."""
    setting = SETTINGS[name]
    engine = RolloutEngine(setting, arguments, model)
    engine.run()
    rounds = [(reference.run(), engine.run()) for _ in range(arguments.rounds)]
    engine.end()
    tokens = _tokens(arguments)
    return {
        "setting": name,
        "is": setting.says,
        "times_faster": _median(base["seconds"] / own["seconds"] for base, own in rounds),
        "times_faster_by_cpu": _median(base["cpu_seconds"] / own["cpu_seconds"] for base, own in rounds),
        "tokens_per_second": _median(tokens / own["seconds"] for _, own in rounds),
        "tokens_per_cpu_second": _median(tokens / own["cpu_seconds"] for _, own in rounds),
        "steps": rounds[0][1]["steps"],
        "start_seconds": round(engine.start_seconds, 2),
    }


def parts_of(setting: Setting, arguments: argparse.Namespace, model: Path) -> dict[str, float]:
    """Return the shares of a rollout by computation: the median over rounds."""
    engine = RolloutEngine(setting, arguments, model, parts=True)
    engine.run()
    runs = [engine.run() for _ in range(arguments.rounds)]
    engine.end()
    shares = [{part: seconds / run["seconds"] for part, seconds in run["parts"].items()} for run in runs]
    return {part: round(statistics.median(each.get(part, 0.0) for each in shares), 4) for part in shares[0]}


def _tokens(arguments: argparse.Namespace) -> int:
    batch = requests_of(arguments.samples, arguments.prompt, arguments.response, VOCABULARY, arguments.seed)
    return sum(length for _, length in batch)


def _median(values: Iterable[float]) -> float:
    return round(statistics.median(values), 3)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="*", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--response", type=int, default=256, help="tokens of the longest")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--verbose", action="store_true", help="show what vLLM says")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        write_model(model, arguments)
        parts = {
            "core": parts_of(REFERENCE, arguments, model),
            "LLM.generate": parts_of(SETTINGS["generate-logprobs"], arguments, model),
        }
        print(json.dumps(parts, indent=1))
        reference = RolloutEngine(REFERENCE, arguments, model)
        reference.run()
        figures = []
        for name in arguments.settings:
            figures.append(measure(name, reference, arguments, model))
            print(figures[-1], flush=True)
        reference.end()
    if arguments.json:
        settings = {"samples": arguments.samples, "prompt": arguments.prompt, "response": arguments.response}
        machine = {"device": device_name(torch.device("cpu")), "threads": arguments.threads}
        print(json.dumps({**machine, **settings, "tokens": _tokens(arguments), "parts": parts, "settings": figures}))


if __name__ == "__main__":
    main()
