"""Base of all manifest models: camelCase outside, snake_case inside; docstrings are descriptions.

Types are strict: "5" is not a number, 1.0 is not an integer, NaN and infinity are not allowed.
"""

from typing import Annotated, Any, ClassVar, Final, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

Location = Annotated[str, Field(min_length=1, max_length=4096)]
"""Path of a file or folder, or hub id of a model; at most 4096 characters."""
PYTHON_NAME: Final = r"[A-Za-z_][A-Za-z0-9_]*"
"""Pattern of the name of a function, a class or an environment variable."""
NAME_PATTERN: Final = f"^{PYTHON_NAME}$"
MODULE_PATTERN: Final = rf"^{PYTHON_NAME}(\.{PYTHON_NAME})*$"
"""Pattern of an importable module."""


LARGEST: Final = 1_000_000
"""Bound of numbers without a natural one."""


class _ZeroIsOff:
    """Marks a field that is off as None in Python and as 0 in a manifest."""


class ApiModel(BaseModel):
    """A block of the RLHFJob manifest. Frozen: a job is resolved into a new object."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        validate_default=True,
    )

    exactly_one: ClassVar[tuple[str, ...]] = ()
    """Members (Python names) of a union, exactly one of which must be set. The CRD's rule is generated from this."""
    at_most_one: ClassVar[tuple[str, ...]] = ()
    """Members (Python names) that exclude each other. The CRD's rule is also generated from this."""

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        members = self.exactly_one or self.at_most_one
        set_members = [name for name in members if getattr(self, name) is not None]
        if (self.exactly_one and not set_members) or len(set_members) > 1:
            # This text is for jobs built in Python; manifests get the rule's own message (rlhf_api.rules).
            raise PydanticCustomError(
                "exactly_one",
                "{most} one of {members} must be set, got {given}",
                {
                    "most": "exactly" if self.exactly_one else "at most",
                    "members": ", ".join(to_camel(name) for name in members),
                    "given": " and ".join(to_camel(name) for name in set_members) or "none",
                },
            )
        return self

    @model_serializer(mode="wrap")
    def _write_off_as_zero(self, handler: SerializerFunctionWrapHandler, info: SerializationInfo) -> dict[str, Any]:
        # Not on the field: `exclude_none` would drop it, and reading would bring the default back.
        data: dict[str, Any] = handler(self)
        for name, field in type(self).model_fields.items():
            if getattr(self, name) is None and any(isinstance(mark, _ZeroIsOff) for mark in field.metadata):
                data[field.alias if info.by_alias and field.alias else name] = 0.0
        return data


def _zero_is_none(value: object) -> object:
    return None if value == 0 and not isinstance(value, bool) else value


PositiveOrOff = Annotated[
    Annotated[float, Field(ge=0, le=LARGEST)] | None,
    BeforeValidator(_zero_is_none),
    _ZeroIsOff(),
]
"""A positive number, or off: 0 in a manifest (the API server replaces null by the default), None in Python."""
