"""`locust -f loadtest/locustfile.py`: the open loop under locust's web page, CSVs and workers.

    locust -f loadtest/locustfile.py --host http://127.0.0.1:8000 --headless --kvlift-rate 5 --kvlift-count 500

locust's own wait times begin when a task ends, which makes a closed loop: the load falls as answers slow down. So each
worker process has one user, whose one task runs the dispatcher over its share of the schedule. The statistics show
`ttft` and `total`, in ms from the scheduled time. Options: locust_options.py, and the form of the web page; locust
prints its `--help` before it reads this file.
"""

from __future__ import annotations

from typing import Any

from locust import LoadTestShape, User, events, task
from locust.exception import StopUser

from loadtest.locust_options import add_options
from loadtest.locust_session import Session

events.init_command_line_parser.add_listener(add_options)


class OpenLoopUser(User):
    """Sends one worker's share."""

    session: Session

    @task
    def send_share(self) -> None:
        self.session.send_share()
        raise StopUser

    def stop(self, force: bool = False) -> Any:
        self.session.stop_share()
        return super().stop(force)


class OnePerWorker(LoadTestShape):
    """One user on each worker, until all shares are done."""

    session: Session

    def tick(self) -> tuple[int, float] | None:
        users = self.session.users()
        return None if users is None else (users, users)


@events.init.add_listener
def _begin(environment: Any, runner: Any, **_: Any) -> None:
    OpenLoopUser.session = OnePerWorker.session = Session(environment, runner)
