"""Base of all manifest models: camelCase outside, snake_case inside, no unknown fields; docstrings are descriptions."""

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel


class ApiModel(BaseModel):
    """A part of the RLHFJob manifest. Frozen: a job is resolved into a new object, never edited in place."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        validate_default=True,
    )
