"""Scenarios of checkpoints and disks. One value every 30 seconds: 120 are an hour."""

from typing import Final

from tests.support.observability.promtool_files import JOB, AlertScenario, Firing, fires, of_job, phase, silent


def _versions(trained: str, saved: str, every: str = "10x400") -> dict[str, str]:
    series = of_job("rlhf_weight_version", trained) | of_job("rlhf_checkpoint_version", saved)
    return series | (of_job("rlhf_checkpoint_interval_iterations", every) if every else {})


def _disk(free: str, size: str = "1000000000000x800", checkpoint: str = "") -> dict[str, str]:
    series = of_job("rlhf_disk_free_bytes", free, folder="run") | of_job("rlhf_disk_size_bytes", size, folder="run")
    return series | (of_job("rlhf_checkpoint_size_bytes", checkpoint) if checkpoint else {})


def _failures(values: str) -> dict[str, str]:
    return of_job("rlhf_checkpoint_failures_total", values)


SCENARIOS: Final[tuple[AlertScenario, ...]] = (
    fires(
        "RLHFCheckpointOverdue",
        "saving hangs, and the iteration does not end",
        _versions("0+1x10 10x200", "0x300"),
        "37m",
        "10",
        before="34m",
    ),
    fires(
        "RLHFCheckpointOverdue",
        "saving hangs five iterations after the checkpoint of a suspension",
        _versions("0+1x20 20x200", "0x10 10x5 15x300"),
        "42m",
        "20",
        before="39m",
    ),
    silent(
        "RLHFCheckpointOverdue",
        "a save takes twenty minutes",
        _versions("0+1x10 10x40 11+1x8 19x9", "0x50 10x100"),
        "20m",
        "34m",
    ),
    silent(
        "RLHFCheckpointOverdue",
        "saving hung, and the job failed",
        _versions("0+1x10 10x200", "0x300") | phase("_x40 1x200", "Failed"),
        "30m",
        "40m",
    ),
    silent("RLHFCheckpointOverdue", "each comes in time", _versions("0+1x30", "0x10 10x10 20x10"), "10m", "15m"),
    silent("RLHFCheckpointOverdue", "the job makes none", _versions("0+1x100", "0x100", every=""), "40m"),
    silent("RLHFCheckpointOverdue", "it has just begun", _versions("0+1x19", "0x19"), "9m"),
    AlertScenario(
        "RLHFCheckpointFailing",
        "the folder is read-only, and the job ends by it",
        _failures("0x20 1x2 2x2 3 stale") | phase("1x27 stale") | phase("_x28 1x200", "Failed"),
        {"10m": (), "12m": (Firing("2", JOB),), "20m": (Firing("3", JOB),), "50m": ()},
    ),
    silent("RLHFCheckpointFailing", "none fails", _failures("0x200") | phase("1x200"), "1h"),
    silent(
        "RLHFCheckpointFailing",
        "a coordinator of before had a failure",
        _failures("2x100 stale") | _failures("_x100 0x100") | phase("1x400"),
        "45m",
    ),
    silent(
        "RLHFCheckpointFailing",
        "one try failed, and the job is complete",
        _failures("0x20 1x4 stale") | phase("1x24 stale") | phase("_x25 1x200", "Complete"),
        "13m",
        "20m",
    ),
    fires(
        "RLHFDiskNearlyFull",
        "two hundredths are left",
        _disk("20000000000x60"),
        "10m",
        "18.63Gi",
        before="4m",
        folder="run",
    ),
    fires(
        "RLHFDiskNearlyFull",
        "less than two checkpoints fit",
        _disk("90000000000x60", checkpoint="60000000000x60"),
        "10m",
        "83.82Gi",
        folder="run",
    ),
    silent("RLHFDiskNearlyFull", "a fifth is left", _disk("200000000000x60", checkpoint="60000000000x60"), "20m"),
    silent(
        "RLHFDiskNearlyFull", "a file is written and moved", _disk("200000000000x20 1x4 200000000000x60"), "12m", "20m"
    ),
    fires(
        "RLHFDiskFillingUp",
        "the journal grows",
        _disk("400000000000-500000000x600"),
        "3h",
        "204.9Gi",
        before="20m",
        folder="run",
    ),
    silent("RLHFDiskFillingUp", "it is large and nearly empty", _disk("900000000000-500000000x600"), "3h"),
    silent(
        "RLHFDiskFillingUp", "checkpoints come and go", _disk(" ".join(["400000000000x30 370000000000x30"] * 8)), "3h"
    ),
)
