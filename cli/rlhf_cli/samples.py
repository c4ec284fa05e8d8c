"""`rlhf samples`: the sample tables of a run folder, as a table, as one sample in full, as JSON or as one parquet file.

Rule: the texts are untrusted: control characters are escaped for the terminal, and no text is markup.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.text import Text

from rlhf_cli.console import columns, output
from rlhf_cli.local.errors import RunError
from rlhf_cli.local.run_folder import RUNS, holds_run, why_no_run
from rlhf_cli.output_file import check_output_file
from rlhf_common.json_document import parse_json
from rlhf_common.names import ExitCode
from rlhf_coordinator.reports.sample_table import SampleRow, best_first, line_of, read_table, table_files, visible
from rlhf_operator.manifests.mount_paths import JOB_KEY

TEXT_WIDTH: Final = 80
"""Maximum characters of a response in the table."""
PROMPT_WIDTH: Final = 40
"""Maximum characters of a prompt in the table."""


@dataclass(frozen=True)
class SampleChoice:
    """The selection of samples to show."""

    iteration: int | None = None
    best: int | None = None
    worst: int | None = None
    sample: int | None = None


def show_samples(run_dir: Path | None, choice: SampleChoice, *, as_json: bool, parquet: Path | None) -> int:
    """Print or write the samples; return the exit code. Raises RunError when the run has no such table."""
    _check(choice)
    if parquet is not None:
        check_output_file("--parquet", parquet)
        if as_json or choice != SampleChoice():
            raise RunError(f"--parquet {parquet}: writes every sample of every table; leave out the other options")
    folder = run_dir or _newest_run()
    files = table_files(folder)
    if not files:
        raise RunError(f"RUN {folder}: {_why_no_tables(folder)}")
    if parquet is not None:
        rows = [row for path in files.values() for row in _read(path)]
        if not rows:
            raise RunError(f"RUN {folder}: its tables have no rows, so there is nothing to write to {parquet}")
        return _write_parquet(rows, parquet)
    iteration = max(files) if choice.iteration is None else choice.iteration
    if iteration not in files:
        raise RunError(f"--iteration {iteration}: {folder} has tables of iterations {_ranges(list(files))}")
    rows = chosen(_read(files[iteration]), choice)
    if as_json:
        for row in rows:
            print(line_of(row))
    elif choice.sample is not None:
        _print_whole(rows[0], output())
    else:
        console = output()
        console.print(Text(f"iteration {iteration}", style="bold"))
        for line in lines_of(rows, console.width if console.is_terminal else None):
            console.print(line, soft_wrap=True)
    return int(ExitCode.OK)


def chosen(rows: Sequence[SampleRow], choice: SampleChoice) -> list[SampleRow]:
    """Return the selected rows in the order of display. Raises RunError."""
    if choice.sample is not None:
        found = [row for row in rows if row.sample == choice.sample]
        if not found:
            raise RunError(f"--sample {choice.sample}: the table has samples {_ranges([row.sample for row in rows])}")
        return found
    judged = best_first(rows)
    if choice.best is None and choice.worst is None:
        return list(rows)
    best = judged[: max(0, choice.best or 0)]
    worst = judged[::-1][: max(0, choice.worst or 0)]
    return best + worst


def lines_of(rows: Sequence[SampleRow], width: int | None) -> list[Text]:
    """Return rows as lines of aligned columns, a heading and one line per sample, cut at `width`; None: no limit."""
    cells = [("SAMPLE", "REWARD", "SHAPED", "ADVANTAGE", "TOKENS", "FINISH", "WORKER", "PROMPT", "RESPONSE")]
    for row in rows:
        moved = f" (+{len(row.workers) - 1})" if row.migrated else ""
        cells.append(
            (
                str(row.sample),
                "none" if row.reward is None else f"{row.reward:.4g}",
                "" if row.shaped_reward is None else f"{row.shaped_reward:.4g}",
                "" if row.advantage is None else f"{row.advantage:.3f}",
                str(row.response_tokens),
                "failed" if row.failed else _one_line(row.finish_reason, TEXT_WIDTH),
                _one_line(row.workers[-1] + moved if row.workers else "", TEXT_WIDTH),
                _one_line(row.prompt, PROMPT_WIDTH),
                _one_line(row.response, TEXT_WIDTH),
            )
        )
    return columns(cells, width)


def _check(choice: SampleChoice) -> None:
    """Raise RunError for numbers out of range, or for --sample with others."""
    least = {"iteration": 0, "sample": 0, "best": 1, "worst": 1}
    for name, number in asdict(choice).items():
        if number is not None and number < least[name]:
            raise RunError(f"--{name} {number}: give a number of at least {least[name]}")
    if choice.sample is not None and (choice.best is not None or choice.worst is not None):
        raise RunError(f"--sample {choice.sample}: means one sample; leave it out, or --best and --worst")


def _why_no_tables(folder: Path) -> str:
    """Explain why a folder has no sample tables, and name the remedy."""
    if not holds_run(folder):
        return why_no_run(folder)
    try:
        mode = parse_json((folder / JOB_KEY).read_bytes())["spec"]["samples"]["mode"]
    except (OSError, ValueError, KeyError, TypeError):
        return f"the run has no sample tables, and its {JOB_KEY} does not say whether spec.samples.mode was Disabled"
    if mode == "Disabled":
        return "the run has no sample tables: its spec.samples.mode is Disabled; the next run writes them without that"
    return "the run has no sample tables yet: no iteration that writes one (spec.samples.every) is finished"


def _print_whole(row: SampleRow, console: Console) -> None:
    facts = {
        "iteration": row.iteration,
        "sample": f"{row.sample} of prompt group {row.group}, line {row.line} of the prompts",
        "reward": "none" if row.reward is None else f"{row.reward:.6g}",
        "shaped": "" if row.shaped_reward is None else f"{row.shaped_reward:.6g}",
        "parts": ", ".join(f"{name} {value:.6g}" for name, value in row.rewards.items()),
        "advantage": "none" if row.advantage is None else f"{row.advantage:.6g}",
        "response": f"{row.response_tokens} tokens, {'failed' if row.failed else row.finish_reason}",
        "workers": ", ".join(row.workers) + (" (moved)" if row.migrated else ""),
        "weights": ", ".join(f"version {version}: {tokens} tokens" for version, tokens in row.weight_versions),
        "drafted": f"{row.accepted_tokens} of {row.drafted_tokens} tokens accepted",
    }
    for name, value in facts.items():
        if value != "":
            console.print(Text(f"{name:<10} {visible(str(value))}"), soft_wrap=True)
    for name, text in (("PROMPT", row.prompt), ("RESPONSE", row.response)):
        console.print(Text(f"\n{name}", style="bold"))
        console.print(Text(visible(text)), soft_wrap=True)
    if row.cut:
        console.print(Text("\n(a text is longer than what the table keeps of it)", style="dim"))


def _write_parquet(rows: Sequence[SampleRow], path: Path) -> int:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise RunError("--parquet needs pyarrow: pip install 'rlhf-operator[data]'") from error
    records = [
        {
            **asdict(row),
            "rewards": list(row.rewards.items()),
            "weight_versions": [{"version": version, "tokens": tokens} for version, tokens in row.weight_versions],
        }
        for row in rows
    ]
    kinds = {
        "rewards": pyarrow.map_(pyarrow.string(), pyarrow.float64()),
        "weight_versions": pyarrow.list_(pyarrow.struct([("version", pyarrow.int64()), ("tokens", pyarrow.int64())])),
        "workers": pyarrow.list_(pyarrow.string()),
        "reward": pyarrow.float64(),
        "shaped_reward": pyarrow.float64(),
        "advantage": pyarrow.float64(),
    }
    arrays = {name: pyarrow.array([record[name] for record in records], type=kinds.get(name)) for name in records[0]}
    try:
        pyarrow.parquet.write_table(pyarrow.table(arrays), path)
    except OSError as error:
        raise RunError(f"--parquet {path}: cannot be written ({error})", ExitCode.STORAGE) from error
    output().print(Text(f"{len(rows)} samples written to {path}"))
    return int(ExitCode.OK)


def _read(path: Path) -> list[SampleRow]:
    try:
        return list(read_table(path))
    except (OSError, ValueError) as error:
        raise RunError(f"{error}; tables of another version are read by the rlhf of that version") from error


def _newest_run() -> Path:
    runs = [path for path in RUNS.glob("*") if table_files(path)]
    if not runs:
        raise RunError(f"no run in {RUNS.absolute()} has sample tables; give a run folder")
    return max(runs, key=lambda path: path.stat().st_mtime)


def _one_line(text: str, width: int) -> str:
    line = visible(text[: width + 1].replace("\n", "⏎"))
    return line if len(line) <= width else line[: width - 1] + "…"


def _ranges(numbers: Sequence[int]) -> str:
    """Return the first 20 numbers as text, and the count of the others."""
    shown = ", ".join(map(str, numbers[:20]))
    return shown + (f" and {len(numbers) - 20} more, up to {numbers[-1]}" if len(numbers) > 20 else "")
