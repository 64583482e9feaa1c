"""The router's configuration: one YAML file, read into these models. Seconds and bytes unless said otherwise.

`load_config(path)` is the way in; every model forbids keys that it does not know.

file     the whole, and what its parts must agree on
tiers    the models, their workers, how these are started
lift     the hand-over of the KV cache
limits   what requests may cost; health, breaker and restart of workers
access   where clients connect, and their keys
telemetry    where spans go, and how logs are written
base     what a section is made of
"""

from router.config.access import Auth, ClientKey, Listen
from router.config.base import Section
from router.config.file import ALIAS, Config, Escalation, load_config
from router.config.lift import Lift, LiftPair, Selector
from router.config.limits import Breaker, Health, Limits, Restart
from router.config.telemetry import Telemetry, Traces
from router.config.tiers import Argument, Replica, Start, Tier

__all__ = [
    "ALIAS",
    "Argument",
    "Auth",
    "Breaker",
    "ClientKey",
    "Config",
    "Escalation",
    "Health",
    "Lift",
    "LiftPair",
    "Limits",
    "Listen",
    "Replica",
    "Restart",
    "Section",
    "Selector",
    "Start",
    "Telemetry",
    "Tier",
    "Traces",
    "load_config",
]
