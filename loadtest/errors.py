"""What can go wrong in a load test, as one tree.

KVLiftError                 the root, in sglang_ext.errors
  LoadTestError
    BadSchedule             a rate, count or spread from which no arrivals can be drawn
      BadTrace              a recorded trace that cannot be read; names file, line and what was expected
    BadPrompt               no prompt of so many tokens can be made
    BadRows                 a file of rows that cannot be read or must not be written
    BadTarget               an address that is none
    TargetDown              no connection to the target, at the start or in mid-run
    ServerFault             a server that answers, and not as it must
    BadSystem               a name that is no system, or one whose server is missing
    BadRun                  a run's folder that cannot be read or written, or is of other servers
    NotMeasured             a figure that needs another one first
    LoadFailed              a load that counts only as a whole, and of which some failed
    Stopped                 a signal ended the run; what was measured is kept
    NothingSucceeded        not one request of a run got a whole answer
    CallFailed              one request got no whole answer; becomes its row's error and ends no run
      Unreachable           not even a connection; many in a row end the run as TargetDown
"""

from __future__ import annotations

from sglang_ext.errors import KVLiftError


class LoadTestError(KVLiftError):
    """Base of every error of the load tester."""


class BadSchedule(LoadTestError):
    """A rate, count or spread from which no arrivals can be drawn."""


class BadTrace(BadSchedule):
    """A recorded trace that cannot be read."""


class BadPrompt(LoadTestError):
    """A prompt length that cannot be met, or a tokenizer that cannot be used."""


class BadRows(LoadTestError):
    """A file of rows that cannot be read, or that must not be written."""


class BadTarget(LoadTestError):
    """An address that no request can be sent to."""


class TargetDown(LoadTestError):
    """No connection to the target."""


class ServerFault(LoadTestError):
    """A server that answers, and not as it must."""


class BadSystem(LoadTestError):
    """A name that is no system, or a system whose server is missing."""


class BadRun(LoadTestError):
    """A run's folder that cannot be read or written, or that is of other servers."""


class NotMeasured(LoadTestError):
    """A figure that needs a measurement which is not there."""


class LoadFailed(LoadTestError):
    """A load that counts only as a whole, and of which some requests failed."""


class Stopped(LoadTestError):
    """A signal ended the run."""


class NothingSucceeded(LoadTestError):
    """Not one request of a run got a whole answer."""


class CallFailed(LoadTestError):
    """One request got no whole answer."""


class Unreachable(CallFailed):
    """One request got not even a connection."""
