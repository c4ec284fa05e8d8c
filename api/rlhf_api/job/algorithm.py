"""`spec.algorithm`: the job's algorithm, with its fields. Exactly one member is set.

The members come from the registry (`rlhf_api.algorithms`).
"""

from typing import TYPE_CHECKING, Any, ClassVar, Final

from pydantic import Field, create_model

from rlhf_api.algorithms.fields import AlgorithmFields
from rlhf_api.algorithms.registry import ALGORITHMS
from rlhf_api.api_model import ApiModel


class AnyAlgorithm(ApiModel):
    """Exactly one of the members, which are the registered algorithms."""

    exactly_one: ClassVar = tuple(ALGORITHMS)

    @property
    def name(self) -> str:
        """Name of the algorithm in the registry."""
        return next(name for name in type(self).model_fields if getattr(self, name) is not None)

    @property
    def fields(self) -> AlgorithmFields:
        """The member that is set."""
        member: AlgorithmFields = getattr(self, self.name)
        return member


if TYPE_CHECKING:
    Algorithm = AnyAlgorithm
else:
    _MEMBERS: Final[dict[str, Any]] = {
        name: (fields | None, Field(None, description=fields.summary)) for name, fields in ALGORITHMS.items()
    }
    Algorithm = create_model("Algorithm", __base__=AnyAlgorithm, __doc__=AnyAlgorithm.__doc__, **_MEMBERS)
