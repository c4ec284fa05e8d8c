"""Compares the weights, optimizer state and metrics that two checkouts train in four small deterministic jobs.

`python benchmarks/compare_weights.py BASE [CHANGED]` runs each job with both checkouts and prints the differences. The
second checkout is this one by default. Each uses the interpreter in its own `.venv`. The exit code is 0 without
differences; a change that only moves code must reach it. `--save FILE` stores the results of a checkout, and a FILE
can replace a checkout.

This checkout creates the models, prompts and manifests once for both, because the quickstart's policy may differ
between the checkouts. An old checkout must know the manifests' fields. Metrics that measure time, or depend on it, are
not compared. A metric that only one checkout has is reported but is no failure.
"""

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support.jobs.local_job import write_job

ROOT: Final = Path(__file__).resolve().parents[1]
COMMAND_LINES: Final = (
    ("cli/rlhf_cli/main.py", "rlhf_cli.main"),
    ("operator/rlhf_operator/cli/main.py", "rlhf_operator.cli.main"),
)
"""(File that a checkout has, module of its command line), newest first."""
TIMED: Final = re.compile(
    r"(^|/|_)(seconds|time|elapsed)|per_second|seconds|bubble|utili[sz]ation|idle|busy|bytes|restarts|fusion/|incremental"
    r"|control_share|stage/|samples/|early|prefix|training/schedule|predicted|timestamp|pool|released|moved|stayed|workers|speculation/|siblings/|ahead/|balance/"
)
"""Names of metrics that are times, or depend on the speed of workers."""
TIME_OUT_SECONDS: Final = 900.0

Results = dict[str, Any]


def jobs(folder: Path) -> dict[str, tuple[Path, tuple[str, ...]]]:
    """Job name -> (manifest, settings). Creates the models and prompts of all jobs below `folder`."""
    quickstart = folder / "quickstart"
    quickstart.mkdir()
    for source in (ROOT / "examples" / "quickstart").glob("*.*"):
        (quickstart / source.name).write_bytes(source.read_bytes())
    subprocess.run([sys.executable, quickstart / "prepare.py"], check=True, stdout=subprocess.DEVNULL)
    tiny = write_job(folder / "tiny", iterations=3, responses=120)
    short = (
        "spec.deterministic=true",
        "spec.iterations=4",
        "spec.rollout.batchSize=64",
        "spec.rollout.maxResponseTokens=24",
    )
    fused = ("mode=Fixed", "threshold=10", "pool=1", "transfer=KV")
    return {
        "quickstart-ppo": (quickstart / "ppo.yaml", short),
        "quickstart-grpo": (quickstart / "grpo.yaml", short),
        "fusion": (
            tiny,
            (
                *(f"spec.fusion.interStage.{setting}" for setting in fused),
                "spec.fusion.intraStage.mode=FusedSplit",
                "spec.inference.replicas=0",
                "spec.algorithm.ppo.klTarget=0.5",
            ),
        ),
        "colocated": (
            tiny,
            ("spec.placement=Colocated", "spec.inference.replicas=0", "spec.algorithm.ppo.klIn=Loss"),
        ),
    }


def run(checkout: Path, name: str, manifest: Path, settings: tuple[str, ...], run_dir: Path) -> Results:
    """Run a job with a checkout; return digests of the safetensors files of its last checkpoint, and the metrics of
    each iteration.
    """
    module = next(module for file, module in COMMAND_LINES if (checkout / file).is_file())
    command = [str(checkout / ".venv" / "bin" / "python"), "-m", module, "run", str(manifest), "--plain"]
    command += ["--run-dir", str(run_dir), *(word for setting in settings for word in ("--set", setting))]
    ended = subprocess.run(command, cwd=checkout, capture_output=True, text=True, timeout=TIME_OUT_SECONDS, check=False)
    if ended.returncode:
        raise SystemExit(f"{checkout}: job {name} ended with code {ended.returncode}\n{ended.stdout}{ended.stderr}")
    newest = max(run_dir.glob("checkpoints/iteration-*"))
    files = sorted(file for file in newest.rglob("*.safetensors"))
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {
        "files": {str(file.relative_to(newest)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files},
        "metrics": [{key: value for key, value in line.items() if not TIMED.search(key)} for line in lines],
    }


def results_of(source: Path, chosen: Mapping[str, tuple[Path, tuple[str, ...]]], folder: Path) -> dict[str, Results]:
    """Job name -> results, of a checkout that runs now or of a file from `--save`."""
    if source.is_file():
        saved: dict[str, Results] = json.loads(source.read_text())
        return {name: saved[name] for name in chosen}
    results = {}
    for name, (manifest, settings) in chosen.items():
        print(f"{source}: {name}", flush=True)
        results[name] = run(source, name, manifest, settings, folder / name)
    return results


def differences(base: Results, changed: Results) -> tuple[list[str], set[str]]:
    """Return (differences between two results of one job, metrics that only one of them has)."""
    files = sorted(base["files"].keys() | changed["files"].keys())
    differing = [f"{file} differs" for file in files if base["files"].get(file) != changed["files"].get(file)]
    if len(base["metrics"]) != len(changed["metrics"]):
        differing.append(f"{len(base['metrics'])} iterations against {len(changed['metrics'])}")
    only: set[str] = set()
    for old, new in zip(base["metrics"], changed["metrics"], strict=False):
        only |= old.keys() ^ new.keys()
        differing += [
            f"iteration {old.get('iteration')}: {key} is {old[key]} and {new[key]}"
            for key in sorted(old.keys() & new.keys())
            if json.dumps(old[key]) != json.dumps(new[key])  # NaN counts as equal to itself
        ]
    return differing, only


def main() -> int:
    """Return exit code 1 if a job's results differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path, help="checkout with a .venv, or a file that --save wrote")
    parser.add_argument("changed", type=Path, nargs="?", default=ROOT, help="the same; this checkout when left out")
    parser.add_argument("--jobs", help="names to run, separated by commas; all when left out")
    parser.add_argument("--save", type=Path, help="writes what the base made, to compare others with")
    parser.add_argument("--json", action="store_true", help="one object as the last line")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rlhf-compare-") as scratch:
        manifests = jobs(Path(scratch))
        names = arguments.jobs.split(",") if arguments.jobs else list(manifests)
        chosen = {name: manifests[name] for name in names}
        base = results_of(arguments.base.absolute(), chosen, Path(scratch) / "base")
        if arguments.save:
            arguments.save.write_text(json.dumps(base, indent=1))
        changed = results_of(arguments.changed.absolute(), chosen, Path(scratch) / "changed")
    equal: dict[str, bool] = {}
    for name in chosen:
        differing, only = differences(base[name], changed[name])
        equal[name] = not differing
        counts = f"{len(base[name]['files'])} files, {len(base[name]['metrics'])} iterations"
        print(f"{name}: {'DIFFERS' if differing else 'equal'} ({counts})")
        for line in differing[:20]:
            print(f"  {line}")
        if only:
            print(f"  in one of them only: {', '.join(sorted(only))}")
    if arguments.json:
        print(json.dumps({"base": str(arguments.base), "changed": str(arguments.changed), "equal": equal}))
    return 0 if all(equal.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
