"""Names, label keys and label values that the API server accepts. A function returns the problem, or an empty text."""

import re
from typing import Final

LABEL_MAX: Final = 63
"""Maximum characters of a DNS label, of a label's value, and of the name in its key."""
SUBDOMAIN_MAX: Final = 253
"""Maximum characters of a DNS subdomain: the name of most objects, and the prefix of a label's key."""
_LABEL_FORM: Final = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
SUBDOMAIN_FORM: Final = rf"^{_LABEL_FORM}(\.{_LABEL_FORM})*$"
"""Pattern of a DNS subdomain, also for the CRD."""
_NAMED: Final = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
_DNS_LABEL: Final = re.compile(_LABEL_FORM)
_SUBDOMAIN: Final = re.compile(SUBDOMAIN_FORM)


def name_problem(name: str, *, label: bool = False) -> str:
    """Return the problem of an object's name, which must be a single DNS label if `label`; empty if it is valid."""
    longest = LABEL_MAX if label else SUBDOMAIN_MAX
    form = _DNS_LABEL if label else _SUBDOMAIN
    if name and len(name) <= longest and form.fullmatch(name):
        return ""
    dots = "and '-'" if label else "'-' and '.'"
    return f"must be at most {longest} lower case letters, digits, {dots}, with a letter or digit first and last"


def qualified_problem(key: str) -> str:
    """Return the problem of a label or annotation key, `name` or `prefix/name`; empty if it is valid."""
    prefix, slash, name = key.rpartition("/")
    wrong = f"must be [prefix/]name, the name at most {LABEL_MAX} letters, digits, '-', '_' and '.'"
    if not name or len(name) > LABEL_MAX or not _NAMED.fullmatch(name):
        return wrong
    return f"{wrong}, the prefix a DNS subdomain" if slash and name_problem(prefix) else ""


def label_problem(value: str) -> str:
    """Return the problem of a label's value; empty if it is valid."""
    if not value or (len(value) <= LABEL_MAX and _NAMED.fullmatch(value)):
        return ""
    return f"must be at most {LABEL_MAX} letters, digits, '-', '_' and '.', with a letter or digit first and last"
