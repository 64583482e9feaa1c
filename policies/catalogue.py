"""The one list of policies by the `method` that a config names."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from policies.answer_rules import AnswerRegex, Empty, InvalidJson, InvalidToolCall, Refusal
from policies.combine import AllOf, AnyOf, Vote, Weighted
from policies.confidence import AvgLogprob, Entropy, Hybrid, Margin, MinWindow
from policies.fixed import Always, Never
from policies.loop import Loop
from policies.request_rules import JsonAsked, Keywords, Language, Length, Regex, Tools
from policies.shadow import Shadow
from policies.target_rate import TargetRate
from policies.tier_rules import Budget, TierBusy, TierReady
from policies.verify import SelfVerify

_Measured = AvgLogprob | Margin | Entropy | MinWindow | Hybrid | TargetRate | SelfVerify
_OnRequest = Length | Keywords | Regex | Tools | JsonAsked | Language
_OnAnswer = AnswerRegex | Refusal | Empty | InvalidJson | InvalidToolCall | Loop
_OnTiers = TierBusy | TierReady | Budget
_Combined = AnyOf | AllOf | Weighted

AnyPart = Annotated[
    _Measured | _OnRequest | _OnAnswer | _OnTiers | _Combined | Always | Never, Field(discriminator="method")
]
"""What a combination may be made of: every policy but `shadow`."""

for _owner in (Vote, AnyOf, AllOf, Weighted, Shadow):  # they name AnyPart, which names them
    _owner.model_rebuild(_types_namespace={"AnyPart": AnyPart, "Vote": Vote})

AnyPolicy = Annotated[
    _Measured | _OnRequest | _OnAnswer | _OnTiers | _Combined | Shadow | Always | Never, Field(discriminator="method")
]
"""For a pydantic field: parses `{method: NAME, parameter: value, ...}` into the policy of that name."""
