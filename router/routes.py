"""What a client may write into `model`, and where it leads."""

from __future__ import annotations

from typing import Any, NamedTuple

from policies import Policy
from router.config import ALIAS, Config
from router.errors import RequestError
from router.request import Options


class Route(NamedTuple):
    """The tiers that a request may visit, in order; `policy` decides between them, None pins the only one."""

    tiers: tuple[str, ...]
    policy: Policy | None


class Routes:
    """The names of one config."""

    def __init__(self, config: Config) -> None:
        self.tiers = tuple(tier.name for tier in config.tiers)
        self._policies: dict[str, Policy] = {ALIAS: config.policies[config.default_policy], **config.policies}
        self._pins = {name: tier.name for tier in config.tiers for name in (tier.name, tier.served)}

    def find(self, model: str, options: Options) -> Route:
        """Raises `RequestError`: 404 for an unknown model, 400 for options that contradict it."""
        if tier := self._pins.get(model):
            if options.policy is not None or options.chooses_lift():
                raise RequestError(
                    f"model {model!r} pins a tier, which neither escalates nor lifts; "
                    "leave out policy, rho, coverage, selector and lift, or set model to a policy",
                    code="invalid_value",
                    param="kvlift",
                )
            return Route((tier,), None)
        if model not in self._policies:
            raise RequestError(
                f"no model {model!r}; names: {', '.join(self._names())}",
                code="model_not_found",
                param="model",
                status=404,
            )
        name = options.policy or model
        if name not in self._policies:
            raise RequestError(
                f"no policy {name!r}; policies: {', '.join(self._policies)}",
                code="invalid_value",
                param="kvlift.policy",
            )
        return Route(self.tiers, self._policies[name])

    def listing(self) -> list[dict[str, Any]]:
        """The names as OpenAI's model objects."""
        kinds = {**dict.fromkeys(self._policies, "policy"), **dict.fromkeys(self._pins, "tier")}
        return [
            {"id": n, "object": "model", "created": 0, "owned_by": "kvlift", "kvlift": {"kind": k}}
            for n, k in kinds.items()
        ]

    def _names(self) -> list[str]:
        return [*self._policies, *self._pins]
