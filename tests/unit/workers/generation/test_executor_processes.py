"""Reports about executor processes that ended, and removal of their shared names."""

from pathlib import Path
from types import SimpleNamespace

from rlhf_workers.generation.vllm_engine.executor_processes import ended_processes, remove_names


def process(name: str, pid: int, exitcode: int | None) -> SimpleNamespace:
    return SimpleNamespace(name=name, pid=pid, exitcode=exitcode)


def test_the_process_that_ended_by_itself_is_named_before_those_that_were_asked_to() -> None:
    assert ended_processes([process("a", 1, None), process("b", 2, None)]) == ""
    ended = [process("a", 1, -15), process("b", 2, -9), process("c", 3, 0), process("d", 4, None)]
    text = ended_processes(ended)
    assert text.startswith("b (pid 2) ended with signal 9, a (pid 1) ended with signal 15")
    assert "d (pid 4)" not in text


def test_names_of_other_groups_are_left(tmp_path: Path) -> None:
    for name in ("vllm_dist_1-tp:0-cpushm_0", "vllm_dist_1-tp:0-cpushm_1", "vllm_dist_12-tp:0-cpushm_0", "psm_1"):
        (tmp_path / name).touch()
    remove_names("", tmp_path)
    remove_names("vllm_dist_1", tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"vllm_dist_12-tp:0-cpushm_0", "psm_1"}
