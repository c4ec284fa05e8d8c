"""Base of all manifest models: camelCase outside, snake_case inside, no unknown fields; docstrings are descriptions.

Types are strict, as the API server's are: "5" is no number, 1.0 is no whole number, NaN and infinity are no numbers.
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
"""A file or folder; 4096 bytes is what Linux takes (PATH_MAX)."""
PYTHON_NAME: Final = r"[A-Za-z_][A-Za-z0-9_]*"
"""Pattern of a function, a class or an environment variable."""
NAME_PATTERN: Final = f"^{PYTHON_NAME}$"
MODULE_PATTERN: Final = rf"^{PYTHON_NAME}(\.{PYTHON_NAME})*$"
"""Of an importable module."""


LARGEST: Final = 1_000_000
"""Of numbers without a natural bound, far above what trains; far beyond it float32 arithmetic overflows."""


class _ZeroIsOff:
    """Marks a field that is None in Python when it is off, and 0 in a manifest."""


class ApiModel(BaseModel):
    """A part of the RLHFJob manifest. Frozen: a job is resolved into a new object, never edited in place."""

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
    """Members (Python names) of a union: exactly one must be set. The CRD's rule is generated from this."""
    at_most_one: ClassVar[tuple[str, ...]] = ()
    """Members (Python names) that exclude each other. The CRD's rule is generated from this, too."""

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        members = self.exactly_one or self.at_most_one
        given = [name for name in members if getattr(self, name) is not None]
        if (self.exactly_one and not given) or len(given) > 1:
            # The text says it all for whoever builds a job in Python; manifests get the rule's own (rlhf_api.rules).
            raise PydanticCustomError(
                "exactly_one",
                "{most} one of {members} must be set, got {given}",
                {
                    "most": "exactly" if self.exactly_one else "at most",
                    "members": ", ".join(to_camel(name) for name in members),
                    "given": " and ".join(to_camel(name) for name in given) or "none",
                },
            )
        return self

    @model_serializer(mode="wrap")
    def _write_off_as_zero(self, handler: SerializerFunctionWrapHandler, info: SerializationInfo) -> dict[str, Any]:
        # Here and not on the field, or `exclude_none` would drop it and the default would come back when it is read.
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
"""A positive number, or off: 0 in a manifest (null brings the default back on the API server), None in Python."""
