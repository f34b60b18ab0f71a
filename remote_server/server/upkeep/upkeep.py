"""Checks of the books and reports to the log, at intervals."""

import logging
from collections.abc import Mapping

from remote_server.server.tenant.tenant import Tenant
from remote_server.store.store import Store
from remote_server.values import format_bytes

log = logging.getLogger(__name__)


CHECK_INTERVAL_S = 10.0


CHECK_MAX_BLOCKS = 50_000  # about 30 ms, during which no client is served


REPORT_INTERVAL_S = 60.0


class Upkeep:
    """Of all tenants, on the loop thread."""

    def __init__(self, tenants: Mapping[str, Tenant], now: float) -> None:
        self._tenants = tenants
        self._next_check = now + CHECK_INTERVAL_S
        self._next_report = now + REPORT_INTERVAL_S
        self._reported: dict[str, dict[str, int]] = {}

    def run(self, now: float, *, idle: bool) -> None:
        """Do what is due; checks only when the loop is `idle`."""
        if idle and now >= self._next_check:
            self._next_check = now + CHECK_INTERVAL_S
            for tenant in self._tenants.values():
                self._check(tenant.store)
        if now >= self._next_report:
            self._next_report = now + REPORT_INTERVAL_S
            for tenant in self._tenants.values():
                self._report(tenant)

    def _check(self, store: Store) -> None:
        if sum(tier.blocks for tier in store.tier_stats().values()) > CHECK_MAX_BLOCKS:
            return
        try:
            store.tier_stack.check()
        except AssertionError:
            store.counters["failed_checks"] += 1
            log.exception("internal counts disagree: please report this as a bug")

    def _report(self, tenant: Tenant) -> None:
        counters = tenant.store.all_counters()
        if counters == self._reported.get(tenant.label):
            return
        self._reported[tenant.label] = counters
        memory = tenant.store.tier_stats()["memory"]
        log.info(
            "%smemory %s of %s in %d blocks, %d evicted; lookups %d of %d keys hit; gets %d of %d",
            tenant.label,
            format_bytes(memory.used_bytes), format_bytes(memory.budget_bytes), memory.blocks,
            counters["evicted"], counters["lookup_hits"], counters["lookup_keys"],
            counters["get_hit"], counters["get_total"],
        )  # fmt: skip
