"""How many requests are served at once: laws of the queue."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.access import Tenant
from router.admission import Admission
from router.config import Limits
from router.errors import Busy

ANY = Tenant("any")


def run(work):
    return asyncio.run(asyncio.wait_for(work(), 10))


async def settle():
    for _ in range(10):
        await asyncio.sleep(0)


class Guests:
    """Requests that stay until they are told to leave."""

    def __init__(self, **limits):
        self.admission = Admission(Limits(**limits))
        self.inside = []
        self.refused = []
        self.tasks = {}
        self.doors = {}

    def come(self, name, tenant=ANY):
        self.doors[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._stay(name, tenant))

    async def _stay(self, name, tenant):
        try:
            async with self.admission.enter(tenant):
                self.inside.append(name)
                await self.doors[name].wait()
        except Busy as busy:
            self.refused.append((name, busy.code, busy.headers()["retry-after"]))

    async def leave(self, name):
        self.doors[name].set()
        await self.tasks[name]
        await settle()


def test_first_come_first_served():
    async def work():
        guests = Guests(max_in_flight=2)
        for name in "abcdef":
            guests.come(name)
        await settle()
        assert guests.inside == ["a", "b"]
        for name in "badcfe":
            await guests.leave(name)
        assert guests.inside == list("abcdef") and guests.admission.idle

    run(work)


def test_what_the_queue_has_no_room_for_is_refused_at_once_with_a_time_to_come_back():
    async def work():
        guests = Guests(max_in_flight=1, max_queue=2)
        for name in "abcd":
            guests.come(name)
        await settle()
        assert guests.refused == [("d", "queue_full", "1")]
        with pytest.raises(Busy):
            guests.admission.check(ANY)
        await guests.leave("a")
        guests.admission.check(ANY)
        for name in "bc":
            await guests.leave(name)
        assert guests.inside == ["a", "b", "c"] and guests.admission.idle

    run(work)


def test_no_queue_at_all():
    async def work():
        guests = Guests(max_in_flight=1, max_queue=0)
        guests.come("a")
        guests.come("b")
        await settle()
        assert guests.refused == [("b", "queue_full", "1")]
        await guests.leave("a")
        guests.come("c")
        await settle()
        assert guests.inside == ["a", "c"]
        await guests.leave("c")

    run(work)


def test_queue_s_bounds_the_wait():
    async def work():
        guests = Guests(max_in_flight=1, queue_s=0.05)
        guests.come("a")
        await settle()
        guests.come("b")
        await guests.tasks["b"]
        assert guests.refused == [("b", "queue_timeout", "1")]
        await guests.leave("a")
        assert guests.admission.idle

    run(work)


def test_who_goes_away_leaves_the_queue_and_holds_up_nobody():
    async def work():
        guests = Guests(max_in_flight=1, max_queue=2)
        for name in "abc":
            guests.come(name)
        await settle()
        guests.tasks["b"].cancel()
        await settle()
        assert guests.admission.waiting.count == 1
        await guests.leave("a")
        assert guests.inside == ["a", "c"]
        await guests.leave("c")
        assert guests.admission.idle

    run(work)


def test_it_is_not_idle_between_one_that_leaves_and_the_next():
    async def work():
        guests = Guests(max_in_flight=1)
        guests.come("a")
        guests.come("b")
        await settle()
        guests.doors["a"].set()
        while guests.inside == ["a"]:
            assert not guests.admission.idle
            await asyncio.sleep(0)
        await guests.leave("b")
        assert guests.admission.idle

    run(work)


def test_a_tenant_has_its_own_limit_and_takes_no_place_of_another():
    async def work():
        guests = Guests(max_in_flight=3)
        few, many = Tenant("few", 1), Tenant("many")
        for name, tenant in (("a", few), ("b", few), ("c", many), ("d", many)):
            guests.come(name, tenant)
        await settle()
        assert guests.inside == ["a", "c", "d"] and guests.refused == [("b", "tenant_busy", "1")]
        guests.come("e", many)
        await settle()
        await guests.leave("a")
        guests.come("f", few)  # waits: that counts too
        guests.come("g", few)
        await settle()
        assert guests.refused[1:] == [("g", "tenant_busy", "1")]
        for name in "cdef":
            await guests.leave(name)
        assert guests.admission.idle

    run(work)


STEPS = st.lists(st.tuples(st.sampled_from(["come", "leave", "cancel"]), st.integers(0, 30)), max_size=40)


@settings(max_examples=60, deadline=None)
@given(steps=STEPS, places=st.integers(1, 3), room=st.integers(0, 3))
def test_the_counts_are_right_whatever_happens_and_zero_at_the_end(steps, places, room):
    async def work():
        guests = Guests(max_in_flight=places, max_queue=room)
        for number, (step, which) in enumerate(steps):
            names = list(guests.tasks)
            if step == "come":
                guests.come(number)
            elif names:
                name = names[which % len(names)]
                guests.doors[name].set() if step == "leave" else guests.tasks[name].cancel()
            await settle()
            admission = guests.admission
            assert admission.in_flight.count <= places and admission.waiting.count <= room
            assert admission.in_flight.count == places or admission.waiting.count == 0
            assert len([task for task in guests.tasks.values() if not task.done()]) == (
                admission.in_flight.count + admission.waiting.count
            )
        for task in guests.tasks.values():
            task.cancel()
        await asyncio.gather(*guests.tasks.values(), return_exceptions=True)
        assert guests.admission.idle
        guests.admission.check(Tenant("any", 1))

    run(work)
