"""The command line of `scripts/gpu-check`.

Rule: parses, and calls; nothing is decided here.
"""

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

from gpu_check.installed_wheels import install
from gpu_check.page import merged, page_of, put_into
from gpu_check.registry import ORDER
from gpu_check.runner import Options, Run

ROOT = Path(__file__).resolve().parents[2]
BUDGET_SECONDS = 520
"""Under nine minutes with what starting and copying take; a command on a rented machine is often cut at ten."""


def parser() -> argparse.ArgumentParser:
    """Return the parser."""
    made = argparse.ArgumentParser(prog="scripts/gpu-check", description="Shows on one GPU what the project claims.")
    made.add_argument("--output", type=Path, default=Path("runs/gpu-check"), help="folder for JSON, page and log")
    made.add_argument("--steps", default="", help="only these, by comma, in the order of importance")
    made.add_argument("--small", action="store_true", help="small sizes: seconds on two CPU cores")
    made.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    made.add_argument("--budget-seconds", type=float, default=BUDGET_SECONDS)
    made.add_argument("--prepared", type=Path, default=ROOT / ".gpu-check", help="folder that `prepare` made")
    made.add_argument("--list", action="store_true", help="name the steps and end")
    verbs = made.add_subparsers(dest="verb")
    wheels = verbs.add_parser("prepare", help="fetch the wheels that a bare machine lacks; needs network")
    wheels.add_argument("--python", default="3.12", help="version of Python there")
    wheels.add_argument("--have", type=Path, default=Path(__file__).with_name("bare_machine.txt"), help="what is there")
    page = verbs.add_parser("page", help="write the page of JSON files into docs/gpu.md, of several runs as one")
    page.add_argument("results", type=Path, nargs="+")
    page.add_argument("--into", type=Path, default=ROOT / "docs" / "gpu.md")
    return made


def chosen(text: str) -> tuple[str, ...]:
    """Return the steps of `--steps`, in the order of the registry."""
    asked = [name.strip() for name in text.split(",") if name.strip()]
    for name in asked:
        if name not in ORDER:
            raise SystemExit(f"gpu-check: --steps: {name!r} is no step; there are: {', '.join(ORDER)}")
    return tuple(name for name in ORDER if not asked or name in asked)


def main() -> int:
    """Return 0 when no step failed."""
    given = parser().parse_args()
    if given.verb == "prepare":
        from gpu_check.prepare import prepare  # needs more than the standard library

        return prepare(ROOT, given.prepared, given.python, given.have)
    if given.verb == "page":
        whole = merged([json.loads(path.read_text()) for path in given.results])
        document = put_into(given.into.read_text(), page_of(whole, level=3))
        given.into.write_text(document)
        return 0
    names = chosen(given.steps)
    if given.list:
        sys.stdout.write("\n".join(names) + "\n")
        return 0
    given.output.mkdir(parents=True, exist_ok=True)
    site = Path(tempfile.mkdtemp(prefix="gpu-check-wheels-"))
    for line in install(given.prepared, site):
        sys.stdout.write(f"{line}\n")
    options = Options(
        root=ROOT,
        output=given.output.resolve(),
        site=site,
        prepared=given.prepared,
        steps=names,
        small=given.small,
        device=given.device,
        budget_seconds=given.budget_seconds,
    )
    run = Run(options)
    try:
        return min(run.all_steps(), 1)
    finally:
        run.close()
        shutil.rmtree(site, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
