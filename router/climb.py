"""One request on its way up the tiers, and the answer that it finds there."""

from __future__ import annotations

from dataclasses import dataclass, field

from policies import Policy
from policies.fixed import Never
from router.attempt import Attempt
from router.budget import Budget
from router.conversation import Conversation
from router.events import AnswerEvent
from router.partial import Partial
from router.record import Record
from router.request import Request
from router.routes import Route
from router.sticky import Seat
from router.worker import Worker

_KEEP_ALL: Policy = Never()


@dataclass(slots=True)
class Answer:
    """An answer that has begun: the events held back so far, and the attempt that goes on with them.

    `partial`: what an earlier tier said first, None where this tier says all. `seat`: where the conversation goes on,
    None where it begins anew with each request. `shadow`: the tier that is asked the same once the client has its
    answer, or None. The owner closes the attempt.
    """

    held: list[AnswerEvent]
    attempt: Attempt
    partial: Partial | None = None
    seat: Seat | None = None
    shadow: str | None = None


@dataclass(slots=True)
class Climb:
    """What is known of a request so far, and what it takes along from tier to tier."""

    request: Request
    route: Route
    record: Record
    budget: Budget
    sources: list[Worker] = field(default_factory=list)  # those that computed this prompt's KV themselves, in order
    pack: str | None = None  # the only one to lift with, where the request names one
    seat: Seat | None = None  # where its conversation was answered last
    partial: Partial | None = None  # what the next tier goes on with
    conversation: Conversation = field(init=False)

    def __post_init__(self) -> None:
        self.conversation = Conversation(self.request.body)

    def later(self, tier: str) -> tuple[str, ...]:
        """The tiers after `tier`."""
        return self.route.tiers[self.route.tiers.index(tier) + 1 :]

    def policy_at(self, tier: str) -> Policy:
        """What judges the answer of a tier; that of the last one is kept."""
        return self.route.policy if self.route.policy is not None and self.later(tier) else _KEEP_ALL
