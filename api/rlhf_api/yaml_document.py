"""YAML documents as plain data with the line of every field, read as `kubectl` reads them.

Scalars have the types of `kubectl apply`: YAML 1.1 booleans (a bare Off is false), `1e-6` is a number, dates stay text.
A duplicate key is an error.
"""

import re
from dataclasses import dataclass, field
from typing import Any, Final

import yaml

from rlhf_api.problems import ManifestError, Problem
from rlhf_common.nesting import MAX_DEPTH, too_deep
from rlhf_common.surrogates import half_pair

MAX_BYTES: Final = 1_048_576
"""Maximum bytes of a manifest."""
MAX_FIELDS: Final = 100_000
"""Maximum fields and items of a manifest after expansion of anchors; a few lines of anchors can mean billions."""
WHOLE_UP_TO: Final = 1e21
"""Bound at which Go's JSON writes a float with an exponent, so that it is no longer an integer."""


@dataclass
class Document:
    """One document of a manifest, as written."""

    data: Any
    lines: dict[str, int] = field(default_factory=dict)
    """Field path -> line of the file, from 1."""
    problems: list[Problem] = field(default_factory=list)
    """Problems of the text itself; `data` is then None."""
    first_line: int = 1

    def line_of(self, path: str) -> int | None:
        """Return the line of a field, or of the nearest field around it; None if neither is in the text."""
        while path:
            if path in self.lines:
                return self.lines[path]
            path = path[: max(path.rfind("."), path.rfind("["), 0)]
        return None


def read_document(text: str) -> Document:
    """Return the only YAML document of a text, not counting empty ones. Raises ManifestError, for example for several
    documents, a duplicate key, or invalid YAML."""
    documents = read_documents(text)
    if len(documents) > 1:
        line = documents[1].first_line
        raise ManifestError([Problem("", None, "a second document begins here: a manifest has one document", line)])
    [document] = documents
    if document.problems:
        raise ManifestError(document.problems)
    return document


def read_documents(text: str) -> list[Document]:
    """Return the YAML documents of a text without empty ones, at least one. Raises ManifestError for invalid YAML, and
    for an empty or too large text."""
    if len(text.encode()) > MAX_BYTES:
        raise ManifestError([Problem("", None, f"the file is larger than {MAX_BYTES} bytes, which no cluster accepts")])
    documents = []
    try:
        loader = _Loader(text)
        while loader.check_node():
            node = loader.get_node()
            if node is not None and node.tag != "tag:yaml.org,2002:null":
                documents.append(_document(loader, node))
    except ManifestError:
        raise
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        reason = ", ".join(part for part in (error.context, error.problem) if part)
        raise ManifestError(
            [Problem("", None, f"not valid YAML: {reason}", mark.line + 1 if mark else None)]
        ) from error
    except yaml.YAMLError as error:
        raise ManifestError([Problem("", None, f"not valid YAML: {error}")]) from error
    except RecursionError as error:
        raise ManifestError([Problem("", None, "not valid YAML: nested too deeply, or into itself")]) from error
    except ValueError as error:  # a number that Python does not parse, such as one of 5000 digits
        raise ManifestError([Problem("", None, f"not valid YAML: {error}")]) from error
    if not documents:
        raise ManifestError([Problem("", None, "the file is empty: an RLHFJob has apiVersion, kind, metadata, spec")])
    return documents


def _document(loader: "_Loader", node: yaml.Node) -> Document:
    document = Document(None, first_line=node.start_mark.line + 1)
    _walk(node, "", document.lines, document.problems)
    if not document.problems:
        document.data = loader.construct_document(node)
        if deep := too_deep(document.data):
            message = f"is nested more than {MAX_DEPTH} levels deep: nothing in a manifest is"
            document.problems.append(Problem(deep, None, message, document.line_of(deep)))
            document.data = None
        elif (half := half_pair(document.data)) is not None:
            message = "has half a surrogate pair, which is not text: write the character itself, not its escapes"
            document.problems.append(Problem(half, None, message, document.line_of(half)))
            document.data = None
    return document


class _Loader(yaml.SafeLoader):
    """A safe loader with the implicit types of kubectl's YAML library."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML reads it from the class


def _implicit(tag: str, pattern: str, first: str) -> None:
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(pattern), list(first))


_implicit("bool", r"^(?:y|Y|yes|Yes|YES|n|N|no|No|NO|true|True|TRUE|false|False|FALSE)$", "yYnNtTfF")
_implicit("bool", r"^(?:on|On|ON|off|Off|OFF)$", "oO")
_implicit("null", r"^(?:~|null|Null|NULL)$", "~nN")
_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"^$"), [""])
_implicit("int", r"^[-+]?(?:0b[01]+|0x[0-9a-fA-F]+|0o?[0-7]*|[1-9][0-9_]*)$", "-+0123456789")
_implicit("float", r"^[-+]?(?:\.[0-9][0-9_]*|[0-9][0-9_]*(?:\.[0-9_]*)?)(?:[eE][-+]?[0-9]+)?$", "-+.0123456789")
_implicit("float", r"^(?:[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$", "-+.")
_implicit("merge", r"^<<$", "<")
_Loader.bool_values = {**yaml.SafeLoader.bool_values, "y": True, "n": False}


def _number(loader: _Loader, node: yaml.ScalarNode) -> float | int:
    """Return a number; whole ones below WHOLE_UP_TO, such as 1e3 and 512.0, are integers, as kubectl sends them."""
    value = float(loader.construct_yaml_float(node))
    return int(value) if value.is_integer() and abs(value) < WHOLE_UP_TO else value


_Loader.add_constructor("tag:yaml.org,2002:float", _number)


def _walk(node: yaml.Node, path: str, lines: dict[str, int], problems: list[Problem]) -> None:
    """Record the line of every field below a node, and every key that is a duplicate or not text.

    Raises ManifestError for more than MAX_FIELDS fields.
    """
    if len(lines) > MAX_FIELDS:
        raise ManifestError([Problem("", None, f"has more than {MAX_FIELDS} fields with its anchors written out")])
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            lines.setdefault(f"{path}[{index}]", item.start_mark.line + 1)
            _walk(item, f"{path}[{index}]", lines, problems)
    if not isinstance(node, yaml.MappingNode):
        return
    seen: dict[str, int] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if key.tag == "tag:yaml.org,2002:merge":
            for merged in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                _walk(merged, path, lines, problems)
            continue
        if key.tag != "tag:yaml.org,2002:str":
            problems.append(Problem(path, str(key.value), "a field name must be text: write it in quotes", line))
            continue
        below = f"{path}.{key.value}" if path else key.value
        if key.value in seen:
            message = f"occurs twice, first in line {seen[key.value]}: remove one of them"
            problems.append(Problem(below, None, message, line))
        seen[key.value] = line
        lines.setdefault(below, line)
        _walk(value, below, lines, problems)
