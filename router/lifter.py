"""From whom a tier takes over a prompt's KV: an earlier tier of the same request, or one that a hint names."""

from __future__ import annotations

from router import lifting
from router.climb import Climb
from router.config import Config
from router.errors import Unavailable
from router.health import Monitor
from router.telemetry import tracing
from router.telemetry.attributes import describe_lift
from router.worker import Worker


class Lifter:
    """The lifts of one config. Only its own workers are asked, whatever a hint says."""

    def __init__(self, config: Config, monitor: Monitor) -> None:
        self._config = config
        self._monitor = monitor

    def hinted_tier(self, climb: Climb) -> str | None:
        """The tier to which the request's hints send it, None where they lead nowhere, which is noted.

        The worker that they name is noted as a source.
        """
        hints = climb.request.hints
        if hints is None:
            return None
        source = next((h.worker for h in self._monitor.by_worker.values() if hints.is_of(h.worker)), None)
        if source is None:
            climb.record.notes.append("hints: they name no worker of this router")
            return None
        pairs = [p for p in self._config.lift.pairs if p.source == source.tier.name and hints.allow(p.pack)]
        target = next((pair.target for pair in reversed(pairs) if pair.target in climb.route.tiers), None)
        if target is None:
            climb.record.notes.append(f"hints: no such pack is configured from tier {source.tier.name!r}")
            return None
        climb.sources.append(source)
        climb.pack = hints.pack
        climb.record.follow_hints(escalates=climb.route.policy is not None)
        return target

    async def namespace(self, climb: Climb, target: Worker) -> str | None:
        """That of the lifted KV, or None for a native prefill. Raises `Unavailable` for a required lift."""
        if climb.seat is not None and climb.seat.tier == target.tier.name:
            return climb.seat.namespace
        record, wish = climb.record, climb.request.options.lift
        if climb.sources and wish != "never":
            outcome = await self._lift(climb, target)
            record.lift = outcome.record
            if outcome.namespace is not None:
                return outcome.namespace
        if wish == "require" and record.escalated:
            why = record.lift.reason if record.lift else f"no tier holds this prompt's KV ({record.reason})"
            raise Unavailable(f"kvlift.lift is 'require' and the lift was not applied: {why}", code="lift_not_applied")
        return None

    async def _lift(self, climb: Climb, target: Worker) -> lifting.LiftOutcome:
        """Lifts from the nearest source that can. Where none can, the outcome says why the nearest cannot."""
        why_nearest = ""
        for source in reversed(climb.sources):
            pack = climb.pack or self._config.pack(source.tier.name, target.tier.name)
            abilities = self._monitor[source.name].capabilities, self._monitor[target.name].capabilities
            hidden = source.why_no_lift or target.why_no_lift
            if reason := hidden or lifting.why_unsupported(*abilities, pack):
                why_nearest = why_nearest or reason
                continue
            assert pack is not None
            native = climb.request.for_worker(target.tier.served, judged_by=None, namespace=None, partial=climb.partial)
            left = climb.budget.seconds_left()
            with tracing.during(tracing.begin(f"lift {source.tier.name} to {target.tier.name}")) as span:
                outcome = await lifting.lift(
                    self._config.lift, source, target, pack, native, climb.request.options, left
                )
                describe_lift(span, outcome.record)
            return outcome
        return lifting.unsupported(why_nearest)
