"""The command line of `scripts/gpu-check`.

Owns the options; parses them and calls the parts. Must never make a decision about a step.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from gpu_check.installed_wheels import install
from gpu_check.runner import STEPS, Options, run_steps

ROOT = Path(__file__).resolve().parents[2]
BUDGET_SECONDS = 520
"""Seconds for the steps, less than nine minutes."""


def parser() -> argparse.ArgumentParser:
    """Return the parser."""
    result = argparse.ArgumentParser(prog="scripts/gpu-check", description="Show on one GPU what the project claims.")
    result.add_argument("--output", type=Path, default=Path("runs/gpu-check"), help="folder for JSON, page and log")
    result.add_argument("--steps", default="", help="only these, by comma, in the order of importance")
    result.add_argument("--small", action="store_true", help="small sizes: seconds on two CPU cores")
    result.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    result.add_argument("--budget-seconds", type=float, default=BUDGET_SECONDS)
    result.add_argument("--prepared", type=Path, default=ROOT / ".gpu-check", help="folder that `prepare` made")
    result.add_argument("--list", action="store_true", help="name the steps and end")
    verbs = result.add_subparsers(dest="verb")
    wheels = verbs.add_parser("prepare", help="fetch the wheels that a bare machine lacks; needs network")
    wheels.add_argument("--python", default="3.12", help="version of Python there")
    wheels.add_argument("--have", type=Path, default=Path(__file__).with_name("bare_machine.txt"), help="what is there")
    return result


def chosen(text: str) -> tuple[str, ...]:
    """Return the steps of `--steps`, in order of importance."""
    asked = [name.strip() for name in text.split(",") if name.strip()]
    for name in asked:
        if name not in STEPS:
            raise SystemExit(f"gpu-check: --steps: {name!r} is no step; there are: {', '.join(STEPS)}")
    return tuple(name for name in STEPS if not asked or name in asked)


def main() -> int:
    """Return 0 if no step failed."""
    options = parser().parse_args()
    if options.verb == "prepare":
        from gpu_check.prepare import prepare  # needs more than the standard library

        return prepare(ROOT, options.prepared, options.python, options.have)
    names = chosen(options.steps)
    if options.list:
        sys.stdout.write("\n".join(names) + "\n")
        return 0
    options.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="gpu-check-", ignore_cleanup_errors=True) as scratch:
        site = Path(scratch, "wheels")
        sys.stdout.writelines(f"{line}\n" for line in install(options.prepared, site))
        rest = Options(options.small, options.device, options.budget_seconds)
        return run_steps(names, ROOT, options.output.resolve(), Path(scratch), options.prepared, rest)


if __name__ == "__main__":
    sys.exit(main())
