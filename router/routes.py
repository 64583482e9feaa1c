"""What a client may write into `model`, and where it leads."""

from __future__ import annotations

from typing import Any, NamedTuple

from policies import Policy
from router.config import ALIAS, Config
from router.errors import RequestError
from router.options import Options


class Route(NamedTuple):
    """The tiers that a request may visit, in order; `policy` decides between them, None pins the only one."""

    name: str  # of the policy or tier
    tiers: tuple[str, ...]
    policy: Policy | None


class Routes:
    """The names of one config."""

    def __init__(self, config: Config) -> None:
        self.tiers = tuple(tier.name for tier in config.tiers)
        self._default = config.default_policy
        self._policies: dict[str, Policy] = {ALIAS: config.policies[config.default_policy], **config.policies}
        self._pins = {name: tier.name for tier in config.tiers for name in (tier.name, tier.served)}

    @property
    def names(self) -> list[str]:
        """All that `model` may be: policies, the default one's alias among them, and tiers."""
        return list(dict.fromkeys((*self._policies, *self._pins)))

    def find(self, model: str, options: Options) -> Route:
        """Raises `RequestError`: 404 for an unknown model, 400 for options that contradict it or each other."""
        self._check_known(model)
        if options.tier is not None:
            return self._pinned(self._tier_of(model, options.tier), "kvlift.tier", options)
        if model in self._pins:
            return self._pinned(self._pins[model], f"model {model!r}", options)
        name = options.policy or model
        if name not in self._policies:
            raise RequestError(
                f"no policy {name!r}; policies: {', '.join(self._policies)}",
                code="invalid_value",
                param="kvlift.policy",
            )
        return Route(self._default if name == ALIAS else name, self.tiers, self._policies[name])

    def listing(self) -> list[dict[str, Any]]:
        """The names as OpenAI's model objects."""
        kinds = {**dict.fromkeys(self._policies, "policy"), **dict.fromkeys(self._pins, "tier")}
        return [
            {"id": n, "object": "model", "created": 0, "owned_by": "kvlift", "kvlift": {"kind": k}}
            for n, k in kinds.items()
        ]

    def model(self, name: str) -> dict[str, Any]:
        """One of the listing. Raises `RequestError` 404."""
        self._check_known(name)
        return next(model for model in self.listing() if model["id"] == name)

    def _tier_of(self, model: str, tier: str) -> str:
        name = self._pins.get(tier)
        if name is None:
            raise RequestError(
                f"no tier {tier!r}; tiers: {', '.join(self.tiers)}", code="invalid_value", param="kvlift.tier"
            )
        if self._pins.get(model, name) != name:
            raise RequestError(
                f"model {model!r} is another tier than kvlift.tier, {tier!r}; leave one of them out",
                code="invalid_value",
                param="kvlift.tier",
            )
        return name

    def _pinned(self, tier: str, by: str, options: Options) -> Route:
        if key := options.of_the_way_up():
            raise RequestError(
                f"{by} pins a tier, which neither escalates nor lifts; leave out kvlift.{key}, "
                f"or set model to a policy: {', '.join(self._policies)}",
                code="invalid_value",
                param=f"kvlift.{key}",
            )
        return Route(tier, (tier,), None)

    def _check_known(self, model: str) -> None:
        if model not in self.names:
            raise RequestError(
                f"no model {model!r}; names: {', '.join(self.names)}",
                code="model_not_found",
                param="model",
                status=404,
            )
