"""The options that the locustfile adds to locust's command line and web page, and the run that they describe."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from pydantic import ValidationError

from loadtest import prompts
from loadtest.client import Client
from loadtest.errors import BadSchedule, BadTarget
from loadtest.generator import Tags
from loadtest.schedule import Arrival, Schedule
from loadtest.systems import Chat, LiftThenChat, System

_KINDS = get_args(Schedule.model_fields["kind"].annotation)


def add_options(parser: ArgumentParser) -> None:
    """Adds the options; on the web page they are fields of the start form."""
    group = parser.add_argument_group("kvlift", "Open-loop load on an OpenAI-compatible server")
    add = group.add_argument
    add("--kvlift-model", default="kvlift", help="`model` of each request: a policy, a tier, or a worker's model")
    add("--kvlift-schedule", choices=_KINDS, default="poisson", help="how requests arrive")
    add("--kvlift-rate", type=float, default=1.0, help="arrivals per second, of all workers together")
    add("--kvlift-count", type=int, default=100, help="arrivals in all; 0 for the whole of a trace")
    add("--kvlift-seed", type=int, default=0, help="the same seed gives the same arrivals and prompts")
    add("--kvlift-cv", type=float, default=2.0, help="coefficient of variation of the gaps (schedule gamma)")
    add("--kvlift-trace", default="", help="CSV of time, context tokens, output tokens (schedule trace)")
    add("--kvlift-scale", type=float, default=1.0, help="how many times as fast as recorded (schedule trace)")
    add("--kvlift-tokens", type=int, default=149, help="tokens of each prompt, template included")
    add("--kvlift-max-tokens", type=int, default=1, help="most tokens of each answer")
    add("--kvlift-tokenizer", default="", help="the target's model folder, for prompts of exact length")
    add("--kvlift-timeout", type=float, default=300.0, help="seconds for a whole answer")
    add("--kvlift-lift-source", default="", help="lift what the worker at this address has prefilled, then ask")
    add("--kvlift-pack", default="", help="the lift's pack; needed where the target has several")
    add("--kvlift-rho", type=float, default=0.3, help="the lift's budget")
    add("--kvlift-rows", default="", help="a new file for one JSON line per request")


def system(options: Namespace, host: str | None) -> System:
    """Raises `BadTarget`."""
    if not host:
        raise BadTarget("no address; say --host http://127.0.0.1:8000")
    client = Client(host, options.kvlift_timeout)
    name = "lift" if options.kvlift_lift_source else options.kvlift_model
    chat = Chat(name, client, options.kvlift_model, options.kvlift_max_tokens)
    if not options.kvlift_lift_source:
        return chat
    return LiftThenChat(chat, options.kvlift_lift_source, options.kvlift_pack or None, options.kvlift_rho)


def arrivals(options: Namespace) -> list[Arrival]:
    """The schedule of all workers together. Raises `BadSchedule`."""
    try:
        schedule = Schedule(
            kind=options.kvlift_schedule,
            rate=options.kvlift_rate,
            count=None if options.kvlift_schedule == "trace" and not options.kvlift_count else options.kvlift_count,
            cv=options.kvlift_cv,
            trace=Path(options.kvlift_trace) if options.kvlift_trace else None,
            scale=options.kvlift_scale,
        )
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        raise BadSchedule(f"--kvlift-{fault['loc'][0]}: {fault['msg']}") from error
    return schedule.arrivals(options.kvlift_seed)


def texts(options: Namespace, share: Sequence[Arrival]) -> dict[int, str]:
    """The prompts of a share. Raises `BadPrompt`."""
    folder = options.kvlift_tokenizer
    made = prompts.ExactPrompts(Path(folder)) if folder else prompts.PlainPrompts()
    return prompts.for_arrivals(made, share, options.kvlift_seed, options.kvlift_tokens)


def tags(options: Namespace) -> Tags:
    return Tags(options.kvlift_seed, None if options.kvlift_schedule == "trace" else options.kvlift_rate)
