"""When to escalate: signals in, decision out. Pure Python; no network, no torch.

A policy is its own parameters (a frozen pydantic model, so that a YAML file can hold it); `begin()`
gives a judge for one request. The judge is told what happens, in order, and answers each time:

    judge = AvgLogprob(threshold=-0.3).begin()
    judge.on_request(facts)      once, before the attempt
    judge.on_token(token)        for each token of the answer
    judge.on_finish(finish)      once, when the answer is complete
    judge.on_check(check)        only where the policy has a `question` and on_finish answered `wait`

Each answer is a `Decision`: keep, escalate or wait, with a reason from a small fixed vocabulary. The first
answer that is not `wait` is final and the caller stops asking.

Two policies remember past requests, for as long as the policy object lives: `target_rate` (scores) and
`shadow` (how many it has kept). All others are their parameters alone.

    confidence, measures, verify                    what the small model's probabilities say
    request_rules, answer_rules, loop, tier_rules   rules, with scripts and patterns behind them
    combine, target_rate, shadow                    policies around policies
    outcomes, calibrate                             a threshold from labelled outcomes
"""

from policies.base import Judge, Policy
from policies.catalogue import AnyPolicy
from policies.signals import Decision, Finish, RequestFacts, SelfCheck, TierState, Token, ToolCall, Verdict

__all__ = [
    "AnyPolicy",
    "Decision",
    "Finish",
    "Judge",
    "Policy",
    "RequestFacts",
    "SelfCheck",
    "TierState",
    "Token",
    "ToolCall",
    "Verdict",
]
