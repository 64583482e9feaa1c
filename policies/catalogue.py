"""The one list of policies by the `method` that a config names."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from policies.confidence import AvgLogprob, Margin, MinWindow
from policies.fixed import Always, Never

AnyPolicy = Annotated[AvgLogprob | Margin | MinWindow | Always | Never, Field(discriminator="method")]
"""For a pydantic field: parses `{method: NAME, parameter: value, ...}` into the policy of that name."""
