"""The execution of the autoscaler's decisions: users are added and removed, steps recorded."""

import asyncio
import math
from collections.abc import Iterator
from typing import Any

from benchmarks.storage_workload.figures.samples import RequestSample
from benchmarks.storage_workload.figures.summary import BEFORE_THE_RUN
from benchmarks.storage_workload.load import autoscale
from benchmarks.storage_workload.load.autoscale import CapacityState, Decision, QosState
from benchmarks.storage_workload.load.driver import Driver

MIN_ANSWERS = 20
"""The least answers of each class: the P95 of fewer is their maximum."""

MAX_PATIENCE = 3
"""Looks with fewer answers, at most; then the available ones decide, and none is an overload."""


class Scaling:
    """One search. `steps` and `summary` are for the record."""

    def __init__(
        self, driver: Driver, mode: str, users: int, target: float, interval_s: float
    ) -> None:
        self.steps: list[dict[str, Any]] = []
        self._driver = driver
        self._mode = mode
        self._target = target
        self._interval_s = interval_s
        self._qos = QosState(users)
        self._capacity = CapacityState(users)
        self._users = users
        self._changed_s = 0.0
        self._judged_s = 0.0
        self._looks = 0
        """Start of the counted answers: each counts in one look only."""

        self._done = False

    async def run(self) -> None:
        """Look every `interval_s` and change the number of users until it is found; then the run
        ends."""
        while not self._done:
            await asyncio.sleep(self._interval_s)
            self._look()
        self._driver.stop()

    @property
    def summary(self) -> dict[str, Any]:
        """`says` is for display. Without `converged` it is the state when the time was up, and
        None when no look had enough answers until then."""
        if self._mode == "capacity":
            state = self._capacity
            looked = state.peak_users > 0
            says = f"Peak: {state.peak:.3f} GB/s with {state.peak_users} users"
            if not self._done:
                says += "; still looking for more when the time was up"
            return {
                "mode": "capacity", "converged": self._done,
                "peak_throughput": state.peak if looked else None, "peak_throughput_unit": "GB/s",
                "peak_user_count": state.peak_users if looked else None,
                "says": says if looked else self._nothing_found,
            }  # fmt: skip
        if not self._qos.seen:
            return {
                "mode": "qos", "converged": False, "final_user_count": None,
                "target_saturation": self._target, "says": self._nothing_found,
            }  # fmt: skip
        users = autoscale.most_users(self._qos, self._target)
        says = f"{users} users within {self._target:.0%} of their targets"
        if not users:
            says = "no number of users was within the targets"
            if self._done:
                says = "not even one user within the targets"
        return {
            "mode": "qos", "converged": self._done, "final_user_count": users,
            "target_saturation": self._target,
            "says": says + ("" if self._done else "; still looking when the time was up"),
        }  # fmt: skip

    @property
    def _nothing_found(self) -> str:
        return (
            f"nothing found: no look in {self._driver.elapsed_s:.0f} s had enough answers; use a "
            f"longer --duration, or a --scale-interval below {self._interval_s:g} s"
        )

    def _look(self) -> None:
        now = self._driver.elapsed_s
        since = max(self._changed_s, now - self._interval_s)
        throughput = self._bytes_since(since) / (now - since) / 1e9
        saturation = self._saturation()
        if self._mode == "capacity":
            self._capacity, decision = autoscale.decide_capacity(self._capacity, throughput)
        elif saturation is None:
            decision = Decision(self._users, "too few answers to judge")
        else:
            self._qos, decision = autoscale.decide_qos(self._qos, saturation, self._target)
        self.steps.append(
            {
                "timestamp": now, "users": self._users, "active": self._driver.num_active,
                "saturation": -1.0 if saturation is None else min(saturation, 1e6),
                "throughput_gb_per_sec": throughput,
                "next_users": decision.users, "reason": decision.reason,
            }
        )  # fmt: skip
        if decision.users != self._users:
            self._driver.set_users(decision.users)
            self._users = decision.users
            self._changed_s = self._judged_s = now
            self._looks = 0
        self._done = decision.done

    def _saturation(self) -> float | None:
        """Over the answers since the last decisive look. None: too few answers so far."""
        found: dict[str, list[float]] = {}
        for request in self._unjudged():
            found.setdefault(request.qos, []).append(1000 * request.served_s)
        self._looks += 1
        is_enough = bool(found) and min(map(len, found.values())) >= MIN_ANSWERS
        if not is_enough and self._looks <= MAX_PATIENCE:
            return None
        self._looks = 0
        self._judged_s = self._driver.elapsed_s
        return autoscale.saturation(found) if found else math.inf

    def _unjudged(self) -> Iterator[RequestSample]:
        """Answers to requests sent under the present number of users."""
        for request in reversed(self._driver.samples.requests):
            if request.ended_s < self._judged_s:
                break
            if request.arrived_s >= self._changed_s:
                yield request

    def _bytes_since(self, since: float) -> int:
        total = 0
        for transfer in reversed(self._driver.samples.transfers):
            if transfer.ended_s < since:
                break
            if transfer.purpose not in ("behind", *BEFORE_THE_RUN):
                total += transfer.num_bytes
        return total
