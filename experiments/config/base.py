"""What all keys of a configuration have in common: strictness, names, and bounds with a name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

from sarathi_sim.profiler.storage.strict import STRICT

# Names become folder and file names.
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]


def _nameable(text: str) -> str:
    if "\0" in text:  # no file is called so
        raise ValueError("must not hold the character NUL")
    return text


Text = Annotated[str, StringConstraints(min_length=1, max_length=4096), AfterValidator(_nameable)]
Count = Annotated[int, Field(ge=1, le=10_000_000)]
Tokens = Annotated[int, Field(ge=1, le=16_777_216)]
Degree = Annotated[int, Field(ge=1, le=4096)]
Positive = Annotated[float, Field(gt=0, le=1e9)]
Seconds = Annotated[float, Field(ge=0, le=3600)]
Share = Annotated[float, Field(gt=0, le=1)]


def key(
    name: str,
    unit: str = "",
    short: str = "",
    *,
    needs: Literal["", "stack", "experts"] = "",
    **field: Any,
) -> Any:
    """A key that figures and tables call by ``name``, and beside a point by ``short``: ``TP 4``.

    One that ``needs`` a stack, or a stack and a model with experts, is refused without them.
    ``field`` is what pydantic's ``Field`` takes: default and bounds.
    """
    given = {"unit": unit, "short": short, "needs": needs}
    extra: Any = {key: text for key, text in given.items() if text}
    return Field(title=name, json_schema_extra=extra, **field)


class Strict(BaseModel):
    """Unknown keys, wrong types, NaN and infinity are errors."""

    model_config = ConfigDict(**STRICT, frozen=True)
