"""What every section of the config is made of."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$", max_length=128)]
Seconds = Annotated[float, Field(gt=0, le=86400)]
Place = tuple[str | int, ...]
"""Keys and indices that lead to a value, below the section that names it."""


class Section(BaseModel):
    """Every key has its text below it: `kvlift config schema` and editors show it."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
