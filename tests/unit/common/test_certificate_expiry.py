"""The end of a certificate's validity is read without a certificate library."""

from datetime import UTC, datetime
from pathlib import Path

import pytest
from cryptography import x509
from hypothesis import given
from hypothesis import strategies as st

from rlhf_common.certificate_expiry import expiry_of_file, not_after
from rlhf_operator.certificates import new_authority

BEGUN = datetime(2026, 8, 22, tzinfo=UTC)


def test_the_end_is_that_of_the_certificate(tmp_path: Path) -> None:
    issued = new_authority("job", BEGUN).issue(["127.0.0.1"], BEGUN)
    issued.write(tmp_path)
    expected = x509.load_pem_x509_certificate(issued.certificate).not_valid_after_utc
    assert expiry_of_file(tmp_path / "tls.crt") == expected.timestamp()
    assert expiry_of_file(tmp_path / "ca.crt") > expected.timestamp() - 1


def test_a_file_without_a_certificate_is_told(tmp_path: Path) -> None:
    (tmp_path / "tls.crt").write_text("nothing")
    with pytest.raises(ValueError, match="holds no certificate"):
        expiry_of_file(tmp_path / "tls.crt")


@given(st.binary(max_size=200))
def test_bytes_that_are_no_certificate_raise_valueerror_and_nothing_else(content: bytes) -> None:
    with pytest.raises(ValueError):
        not_after(content)
