"""Types of parameters that several policies have."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

TierName = Annotated[str, Field(min_length=1)]
Share = Annotated[float, Field(ge=0, le=1)]
Weight = Annotated[float, Field(gt=0, allow_inf_nan=False)]
