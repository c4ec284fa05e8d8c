"""Walks the blocks of a job, so that a rule over a kind of field applies to every such field."""

from collections.abc import Iterator

from rlhf_api.api_model import ApiModel


def parts(node: object, path: str) -> Iterator[tuple[str, ApiModel]]:
    """Yield (manifest path, model) of a model and of every model below it."""
    if isinstance(node, list):
        for index, entry in enumerate(node):
            yield from parts(entry, f"{path}[{index}]")
    if not isinstance(node, ApiModel):
        return
    yield path, node
    for name, field in type(node).model_fields.items():
        yield from parts(getattr(node, name), f"{path}.{field.alias or name}")


def texts(node: object, path: str) -> Iterator[tuple[str, str]]:
    """Yield (manifest path, text) of every text in JSON data."""
    if isinstance(node, str):
        yield path, node
    elif isinstance(node, list):
        for index, entry in enumerate(node):
            yield from texts(entry, f"{path}[{index}]")
    elif isinstance(node, dict):
        for name, entry in node.items():
            yield from texts(entry, f"{path}.{name}")
