"""Types of settings, with their bounds, and the base of all sections."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, Strict, StringConstraints
from pydantic_core import PydanticCustomError

from maxlm.base import paths
from maxlm.config.extensions import misfit

INT64 = 2**63 - 1  # no count of ours is larger, and arrays hold no more
BELOW_ONE = 1 - 2**-25  # larger numbers round to 1 in float32
SMALLEST, LARGEST = 2.0**-126, (2 - 2**-23) * 2.0**127  # of the normal numbers of float32


def in_float32(value: float) -> float:
    """A number that is computed with in float32: below its normal numbers it would be flushed to 0, above them infinite."""
    if value != 0 and not SMALLEST <= abs(value) <= LARGEST:
        paths.refuse("be 0 or between 1.2e-38 and 3.4e38 in size, as float32 holds", "use a number in that range")
    return value


def whole(value: Any) -> Any:
    """A choice of numbers takes neither `true` for 1 nor 1.0, which Python holds for equal."""
    if type(value) is not int:
        raise PydanticCustomError("int_type", "must be a whole number")
    return value


def written_with_exponent(value: Any) -> Any:
    """A number of tokens as people write it: 15e12 is a whole number, 1.5 is none."""
    return int(value) if isinstance(value, float) and abs(value) <= 2**53 and value.is_integer() else value


Int = Annotated[int, Strict(), Field(ge=-INT64, le=INT64)]
Positive = Annotated[int, Strict(), Field(ge=1, le=INT64)]
Count = Annotated[int, Strict(), Field(ge=0, le=INT64)]
Tokens = Annotated[Positive, BeforeValidator(written_with_exponent)]
NoneOrMoreTokens = Annotated[Count, BeforeValidator(written_with_exponent)]
Seed = Annotated[int, Strict(), Field(ge=0, le=2**32 - 1)]  # jax.random keeps 32 bits, so that larger seeds would repeat smaller ones
Few = Annotated[int, Strict(), Field(ge=1, le=1024)]  # threads, batches in memory, pods
Float = Annotated[float, Strict(), Field(allow_inf_nan=False), AfterValidator(in_float32)]
PositiveFloat = Annotated[Float, Field(gt=0)]
AtLeastOne = Annotated[Float, Field(ge=1)]
NonNegative = Annotated[Float, Field(ge=0)]
Fraction = Annotated[Float, Field(ge=0, le=1)]
Bool = Annotated[bool, Strict()]
Text = Annotated[str, StringConstraints(strict=True, min_length=1, pattern=r"^[^\x00]*$")]
LocalPath = Annotated[Text, AfterValidator(paths.local)]
ReadPath = Annotated[Text, AfterValidator(paths.readable)]  # or any URL that fsspec reads: gs://, s3://, hf://, https://
StoredPath = Annotated[Text, AfterValidator(paths.stored)]  # or gs://
StorePath = Annotated[Text, AfterValidator(paths.given_or_stored)]  # or python://NAME, which `maxlm.fit` writes


def module_names(names: tuple[str, ...]) -> tuple[str, ...]:
    """Distinct names of Python modules."""
    if (broken := misfit(names)) is not None:
        paths.refuse(*broken)
    return names


ModuleNames = Annotated[tuple[Text, ...], AfterValidator(module_names)]


class Section(BaseModel):
    """A group of settings: frozen, and a key it does not have is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def flatten(values: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf of nested mappings as (dotted key, value); a list is a leaf."""
    if isinstance(values, Mapping) and values:
        for key, value in values.items():
            yield from flatten(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, values
