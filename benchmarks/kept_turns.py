"""What it gives to keep a sample's KV cache while its environment answers, on one small random model.

    python benchmarks/kept_turns.py --json

Responses of several turns through the engine that has the turns, with a real process of an environment that answers
each at once with as many tokens as `--answer` says. Engines with and without kept caches decode the same samples in
turn, `--repeats` times, the same tokens (checked). Seconds of the processor are this process's: the environment's are
its own. `known_tokens` ran through the model although they had been written already. The last line of --json is one
object.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rlhf_api.job.environment import Environment
from rlhf_api.samples import SampleKey, SampleRequest
from rlhf_workers.generation.engine import EngineLimits, SamplingParameters
from rlhf_workers.generation.environment.environment_calls import EnvironmentCalls
from rlhf_workers.generation.environment.environment_engine import DecodesTurns, EnvironmentEngine
from rlhf_workers.generation.torch_engine.engine import TorchEngine

CHARACTERS = [chr(code) for code in range(0x100, 0x140)]
STOPS = tuple(range(0, len(CHARACTERS), 16))
"""A random policy ends a turn after 16 tokens in the mean."""
CODE = """
class Tool:
    def reset(self, record):
        self.turns = 0

    def step(self, response):
        self.turns += 1
        return {"message": "%s", "done": self.turns == %d}
"""


def build_model(arguments: argparse.Namespace, folder: Path, attention: str) -> Any:
    """Return a random Llama, through a folder, as a job would load it."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(CHARACTERS),
        hidden_size=arguments.hidden,
        intermediate_size=arguments.hidden * 8 // 3 // 32 * 32,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.hidden // 64,
        num_key_value_heads=arguments.hidden // 64,
        max_position_embeddings=8192,
        bos_token_id=None,
        eos_token_id=None,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention).eval()


def build_tokenizer() -> Any:
    """Return one that has a token for each character."""
    tokenizer = Tokenizer(models.WordLevel({text: at for at, text in enumerate(CHARACTERS)}, unk_token=CHARACTERS[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def requests(arguments: argparse.Namespace) -> list[SampleRequest]:
    """Return samples of random prompts."""
    random = np.random.default_rng(0)
    longest = arguments.turns * (arguments.answer + 64)
    return [
        SampleRequest(
            SampleKey(0, index, 0),
            random.integers(1, len(CHARACTERS), arguments.prompt).astype(np.int32),
            index,
            longest,
            record="{}",
        )
        for index in range(arguments.samples)
    ]


def run(engine: EnvironmentEngine, samples: list[SampleRequest]) -> tuple[dict[int, list[int]], int, int]:
    """Decode all; return responses by sample, tokens that ran through the model as known ones, and kept tokens."""
    done: dict[int, list[int]] = {}
    known = kept = 0
    engine.submit(samples)
    while engine.held:
        report = engine.step()
        done |= {one.key.sample: one.tokens.tolist() for one in report.finished}
        known, kept = known + report.prefilled, kept + report.kept
    return done, known, kept


def compare(arguments: argparse.Namespace, folder: Path, *, deterministic: bool) -> dict[str, Any]:
    """Return seconds of both ways, one after the other in every repeat, and how many times faster keeping is."""
    code = folder / "tool.py"
    code.write_text(CODE % (CHARACTERS[1] * arguments.answer, arguments.turns))
    model = build_model(arguments, folder, "eager" if deterministic else "sdpa")
    limits = EngineLimits(arguments.batch, arguments.prompt, arguments.turns * (arguments.answer + 64))
    engines, seconds, cpu, facts, responses = {}, {}, {}, {}, {}  # type: ignore[var-annotated]
    for way in ("computed again", "kept"):
        inner = TorchEngine(
            model,
            build_tokenizer(),
            SamplingParameters(stop_token_ids=STOPS),
            limits,
            deterministic=deterministic,
        )
        if way == "kept":
            inner.keep_turns()
        assert isinstance(inner, DecodesTurns)
        calls = EnvironmentCalls(Environment(file=str(code), name="Tool"), 1)
        calls.start()
        engines[way] = EnvironmentEngine(inner, calls, build_tokenizer(), arguments.turns + 1)
        seconds[way], cpu[way] = [], []
    try:
        for _ in range(arguments.repeats):
            for way, engine in engines.items():
                wall_started, cpu_started = time.perf_counter(), time.process_time()
                responses[way], known, kept = run(engine, requests(arguments))
                seconds[way].append(time.perf_counter() - wall_started)
                cpu[way].append(time.process_time() - cpu_started)
                facts[way] = {"known_tokens": known, "kept_tokens": kept}
    finally:
        for engine in engines.values():
            engine.close()
    again, kept_way = statistics.median(seconds["computed again"]), statistics.median(seconds["kept"])
    return {
        "deterministic": deterministic,
        "tokens": sum(map(len, responses["kept"].values())),
        "same_tokens": responses["kept"] == responses["computed again"],
        "seconds": {way: round(statistics.median(each), 3) for way, each in seconds.items()},
        "times_faster": round(again / kept_way, 2),
        "times_faster_by_processor": round(
            statistics.median(cpu["computed again"]) / statistics.median(cpu["kept"]), 2
        ),
        **facts,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one object as the last line")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=192)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--answer", type=int, default=16, help="tokens of an answer")
    parser.add_argument("--samples", type=int, default=24)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    transformers.utils.logging.set_verbosity_error()
    figures = []
    for deterministic in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            figures.append(compare(arguments, Path(folder), deterministic=deterministic))
        print(figures[-1], flush=True)
    if arguments.json:
        print(json.dumps({**vars(arguments), "figures": figures}))


if __name__ == "__main__":
    main()
