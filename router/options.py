"""What one request may decide for itself: the body key `kvlift`, which is never forwarded."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from router.config import Escalation, Selector
from router.errors import RequestError

_OF_THE_WAY_UP = ("policy", "escalation", "rho", "coverage", "selector")
"""Keys that say how to escalate or lift, which a request that is pinned to a tier never does; `lift` is one too."""


class Options(BaseModel):
    """Every key is optional; what is not given is as the config has it."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    policy: str | None = Field(default=None, description="judges this request; a name of GET /v1/models")
    tier: str | None = Field(default=None, description="the only tier that is asked: it neither escalates nor lifts")
    escalation: Escalation | None = Field(
        default=None, description="on escalation, the next model starts anew or goes on with the partial answer"
    )
    rho: float | None = Field(default=None, ge=0, le=1, description="share of the positions that is recomputed")
    coverage: float | None = Field(default=None, ge=0, le=1, description="instead of rho: share of the scores' sum")
    selector: Selector | None = None
    lift: Literal["auto", "never", "require"] = Field(
        default="auto", description="require: whether it is expected to be faster or not, and 503 where it fails"
    )
    debug: bool = Field(default=False, description="show the text of discarded attempts")

    @classmethod
    def parse(cls, value: Any) -> Options:
        """Raises `RequestError`, which names the key."""
        if value is None:
            return cls()
        try:
            return cls.model_validate(value)
        except ValidationError as error:
            fault = error.errors(include_url=False)[0]
            key = ".".join(["kvlift", *(str(part) for part in fault["loc"])])
            raise RequestError(
                f"{key}: {fault['msg']} (known keys: {', '.join(cls.model_fields)})", code="invalid_value", param=key
            ) from error

    @model_validator(mode="after")
    def _one_budget(self) -> Options:
        if self.rho is not None and self.coverage is not None:
            raise ValueError("give either rho or coverage")
        return self

    def of_the_way_up(self) -> str | None:
        """The first key that says how to escalate or lift, None where none does."""
        given = (key for key in _OF_THE_WAY_UP if getattr(self, key) is not None)
        return next(given, "lift" if self.lift == "require" else None)
