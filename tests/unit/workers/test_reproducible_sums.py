"""If MKL's default depends on memory addresses, a deterministic worker sets another one; a user's value stays."""

import pytest
import torch

from rlhf_workers.devices.reproducible_sums import VALUE, VARIABLE, ask_for_reproducible_sums


@pytest.mark.parametrize(
    ("instructions", "preset", "then"),
    [
        ("AVX2", None, VALUE),
        ("DEFAULT", None, VALUE),
        ("AVX2", "COMPATIBLE", "COMPATIBLE"),
        ("AVX512", None, None),
        ("AVX512_VNNI", None, None),
    ],
)
def test_the_variable_is_set_where_it_is_needed_and_not_given(
    instructions: str, preset: str | None, then: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: instructions)
    environment = {} if preset is None else {VARIABLE: preset}
    monkeypatch.setattr("rlhf_workers.devices.reproducible_sums.os.environ", environment)
    ask_for_reproducible_sums()
    assert environment.get(VARIABLE) == then
