"""A draft model that is trained with the policy beside the same one left as it is: acceptance over a job, and cost.

`python benchmarks/trained_drafter.py [--iterations 40] [--rounds 1] [--assets FOLDER] [--json]`. The quickstart's
policy, and a draft model of a quarter of its parameters that saw like demonstrations before, so that at first both
arms draft equally well. The arms take turns as whole jobs of real processes, equal but for `draftModel.train`; drafts
are of a fixed length, so that every token is drafted for and acceptance is of all of them. Reported, an arm:
acceptance of the first and the last iterations and overall, tokens a decode step, median seconds of training an
iteration; of training the draft model its median seconds an iteration and the longest of its steps, the bytes of a
version, loss, divergence and agreement at both ends; and whether rewards and the policy's last weights were equal.
"""

import argparse
import importlib.util
import json
import random
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support.chaos import run_job

ROOT: Final = Path(__file__).resolve().parents[1]
ARMS: Final = ("Disabled", "Enabled")
EDGE: Final = 5
"""Iterations at either end whose mean is reported."""
WARM_UP_STEPS: Final = 300
"""Supervised steps of the draft model on demonstrations, most of them wrong as the policy's last ones were."""
WARM_UP_RATE: Final = 2e-3
MAX_TOKENS: Final = 4
LEARNING_RATE: Final = 1e-3

Lines = list[dict[str, float]]


def quickstart() -> Any:
    """Return the module that makes what the quickstart trains."""
    file = ROOT / "examples" / "quickstart" / "prepare.py"
    spec = importlib.util.spec_from_file_location("prepare", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_draft_model(prepare: Any, folder: Path, seed: int) -> None:
    """A draft model of one layer and two thirds of the policy's width, which saw the policy's last demonstrations."""
    torch.manual_seed(seed)
    tokenizer, rng = prepare.build_tokenizer(), random.Random(seed)

    def lessons() -> Iterator[tuple[torch.Tensor, torch.Tensor, float]]:
        for _ in range(WARM_UP_STEPS):
            shown = [prepare.demonstration(rng, noise=prepare.NOISE) for _ in range(prepare.BATCH)]
            pairs = [(prompt, response + tokenizer.eos_token) for prompt, response, _ in shown]
            yield *prepare.batch(tokenizer, pairs), WARM_UP_RATE

    draft = prepare.build_policy(tokenizer, prepare.POSITIONS, hidden=64, layers=1)
    prepare.teach(draft, lessons(), lambda loss: None)
    draft.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_job(folder: Path, iterations: int, assets: Path | None) -> Path:
    """The quickstart with a draft model, deterministic so that both arms must train the same bits; `assets`: what its
    prepare.py made before."""
    source = ROOT / "examples" / "quickstart"
    prepare = quickstart()
    if assets is None:
        prepare.prepare(folder / "assets", seed=7, made={})
    else:
        shutil.copytree(assets, folder / "assets")
    write_draft_model(prepare, folder / "draft", seed=11)
    (folder / "reward.py").write_bytes((source / "reward.py").read_bytes())
    job = yaml.safe_load((source / "ppo.yaml").read_text())
    job["spec"] |= {"iterations": iterations, "deterministic": True}
    model = {"path": "draft", "train": "Enabled", "learningRate": LEARNING_RATE}
    speculation = {"mode": "Fixed", "maxTokens": MAX_TOKENS, "drafters": ["Model"], "draftModel": model}
    job["spec"]["generation"] |= {"speculation": speculation, "engine": "torch"}
    manifest = folder / "job.yaml"
    manifest.write_text(yaml.safe_dump(job, sort_keys=False))
    return manifest


def share(lines: Sequence[dict[str, float]]) -> float:
    """Return drafted tokens that were accepted, of all that were drafted in these iterations."""
    drafted = sum(line["speculation/drafted"] for line in lines)
    return round(sum(line["speculation/accepted"] for line in lines) / drafted, 4) if drafted else 0.0


def ends(lines: Lines, name: str) -> list[float]:
    """Return the means of a metric over the first and the last EDGE iterations."""
    return [round(statistics.fmean(line[name] for line in part), 5) for part in (lines[:EDGE], lines[-EDGE:])]


def median(lines: Lines, name: str) -> float:
    """Return the median of a metric, the first iteration left out."""
    return round(statistics.median(line[name] for line in lines[1:]), 5)


def described(lines: Lines) -> dict[str, Any]:
    """Return what is reported of an arm."""
    result: dict[str, Any] = {
        "acceptance_first_last_all": [share(lines[:EDGE]), share(lines[-EDGE:]), share(lines)],
        "tokens_per_step_first_last": [round(value, 3) for value in ends(lines, "speculation/tokens_per_step")],
        "training_seconds": median(lines, "seconds/training"),
        "publish_seconds": median(lines, "seconds/publish"),
        "policy_step_seconds": median(lines, "training/step_seconds"),
    }
    if "training/draft/seconds" in lines[0]:
        result |= {
            f"draft_{name}_first_last": ends(lines, f"training/draft/{name}")
            for name in ("loss", "divergence", "agreement")
        }
        result |= {
            "draft_seconds_an_iteration": median(lines, "training/draft/seconds"),
            "draft_longest_step_seconds": median(lines, "training/draft/step_seconds_max"),
            "draft_published_bytes": median(lines, "training/draft/published_bytes"),
        }
    return result


def measure(manifest: Path, root: Path, rounds: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Run both arms in turns; RuntimeError with a job's output when it fails."""
    lines: dict[str, Lines] = {arm: [] for arm in ARMS}
    outcomes = set()
    for number in range(rounds):
        for arm in ARMS if number % 2 == 0 else ARMS[::-1]:
            run_dir = root / f"{arm}-{number}"
            setting = f"spec.generation.speculation.draftModel.train={arm}"
            ended = run_job(manifest, run_dir, options=["--set", setting])
            if ended.code != 0:
                raise RuntimeError(ended.output[-6000:])
            read = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
            lines[arm] = lines[arm] or read
            outcomes.add((ended.weights, tuple(line["reward"] for line in read)))
            say(f"round {number}, train {arm}: {json.dumps(described(read))}")
    return {**{f"train_{arm}": described(lines[arm]) for arm in ARMS}, "same_rewards_and_weights": len(outcomes) == 1}


def main() -> int:
    """Exit code 1 when a job failed, or the two arms trained another policy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--assets", type=Path, help="folder that examples/quickstart/prepare.py made; else it is made")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # of the warm-up: two that share cores with other work wait for each other
    with tempfile.TemporaryDirectory(prefix="rlhf-trained-drafter-") as folder:
        root = Path(folder)
        manifest = write_job(root, arguments.iterations, arguments.assets)
        result = measure(manifest, root, arguments.rounds, lambda text: print(text, flush=True))
    result |= {"iterations": arguments.iterations, "rounds": arguments.rounds, "max_tokens": MAX_TOKENS}
    print(json.dumps(result) if arguments.json else result)
    return 0 if result["same_rewards_and_weights"] else 1


if __name__ == "__main__":
    sys.exit(main())
