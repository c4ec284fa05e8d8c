"""What training by adapters costs and saves: full training, adapters published merged or alone, and a shared trunk.

Each way trains the same PPO job (actor and critic of one folder, a Llama of 10.6M parameters unless --hidden and
--layers say otherwise) on one rank, in a process of its own; the ways take turns, round by round. Printed of each:
bytes of weights, gradients and moments that the rank holds (every tensor once), the process's largest resident memory,
bytes that one update sends and one checkpoint writes, and the median seconds of an optimizer step and of making what
is published. `--json` prints one object, last line.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

WAYS: Final[dict[str, dict[str, Any] | None]] = {
    "full": None,
    "adapters, merged": {"publish": "Merged"},
    "adapters, alone": {"publish": "Adapters"},
    "adapters, shared trunk": {"publish": "Adapters", "trunk": "Shared"},
}
STEPS: Final = 4
"""Optimizer steps that are timed, after one that is not."""
TIME_OUT_SECONDS: Final = 900


def main() -> None:
    """Run the ways in turns, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=320)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--precision", default="Float32", choices=("Float32", "BFloat16"))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.way:
        print(json.dumps(measured(Path(given.folder), given.way, given.rank, given.precision)))
        return
    with tempfile.TemporaryDirectory() as folder:
        write_policy(Path(folder), given.hidden, given.layers)
        runs: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for _ in range(given.rounds):
            for way in WAYS:
                runs[way].append(in_a_process(way, folder, given))
    table = {
        way: {key: statistics.median(run[key] for run in of_way) for key in of_way[0]} for way, of_way in runs.items()
    }
    keys = list(table["full"])
    print("| | " + " | ".join(WAYS) + " |\n|---|" + "---|" * len(WAYS))
    for key in keys:
        cells = (f"{table[way][key]:,.3f}" if "seconds" in key else f"{table[way][key] / 1e6:,.2f} M" for way in WAYS)
        print(f"| {key} | " + " | ".join(cells) + " |")
    if given.json:
        about = {"rank": given.rank, "precision": given.precision, "rounds": given.rounds, "cpus": os.cpu_count()}
        print(json.dumps({**about, "ways": table}))


def in_a_process(way: str, folder: str, given: argparse.Namespace) -> dict[str, float]:
    """Return the figures of one way, measured in a process of its own."""
    command = [sys.executable, __file__, "--way", way, "--folder", folder]
    command += ["--rank", str(given.rank), "--precision", given.precision]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=TIME_OUT_SECONDS)
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def write_policy(folder: Path, hidden: int, layers: int) -> None:
    """Write the model that all ways train."""
    from tests.support import models

    shape = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_attention_heads": hidden // 32}
    shape |= {"num_key_value_heads": hidden // 32, "head_dim": 32, "num_hidden_layers": layers}
    models.write_policy(folder / "policy", "llama", **shape)


def measured(folder: Path, way: str, rank: int, precision: str) -> dict[str, float]:
    """Return the figures of one way: bytes, and seconds."""
    from tests.support.training_ranks import Alone, exhaust, make_batch, make_job, serial, trainer_of

    from rlhf_workers.training.backends.torch_backend import TorchBackend

    settings = WAYS[way]
    lora = None if settings is None else {"rank": rank, "alpha": 2.0 * rank, **settings}
    training = {"precision": precision, **({} if lora is None else {"lora": lora})}
    job = make_job(folder / "policy", folder / "policy", training=training, deterministic=False)
    trainer = trainer_of(job, serial(job, 1, 1), 0, 1, Alone())
    backend, seconds = TorchBackend(trainer), []
    for iteration in range(STEPS + 1):
        exhaust(trainer.train(iteration, make_batch(seed=iteration)))
        seconds += trainer.step_seconds if iteration else []
    held = {id(part): part for stage in trainer.stages.values() for part in stage.parameters()}
    state = [part for optimizer in trainer.optimizers.values() for part in (optimizer.gradients, *optimizer.moments())]
    begun = time.perf_counter()
    sent = sum(value.nbytes for model in backend.models for _, value in backend.published(model))
    publishing = time.perf_counter() - begun
    files = backend.save(folder / way.replace(", ", "-").replace(" ", "-"), 1)
    return {
        "weights, gradients and moments, bytes": float(sum(part.nbytes for part in [*held.values(), *state])),
        "largest resident memory, bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0,
        "update, bytes": float(sent),
        "checkpoint, bytes": float(sum(file.bytes for file in files)),
        "optimizer step, seconds": statistics.median(seconds),
        "making what is published, seconds": publishing,
    }


if __name__ == "__main__":
    main()
