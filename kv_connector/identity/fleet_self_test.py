"""Start-up canary with several servers: each returns the bytes that it was sent, or is not used.

The copies between engine and pool are tested once, and all servers together have the time of one
canary. A server that has not answered by then is used, as one that is not there yet.
"""

import time
from collections.abc import Callable, Mapping
from concurrent.futures import wait
from contextlib import suppress

from vllm.logger import init_logger

from kv_connector.identity.self_test import (
    LOOK_AGAIN_S,
    TIDYING_S,
    Differs,
    Fixture,
    Outcome,
    Report,
    SelfTest,
    Skip,
    compare_pages,
    reported,
    run_self_test,
)
from remote_server.client import ClientConfig, IoThread, RemoteClient

logger = init_logger("vllm.kvferry.fleet_self_test")


def run_self_tests(
    make_stage: Callable[[], Fixture],
    configs: Mapping[str, ClientConfig],
    *,
    clock: Callable[[], float] = time.monotonic,
) -> Report:
    """Run the canary of one worker on all servers, by their names. Never raises. The report is
    FAILED if the copies between engine and pool are wrong, or every server is.

    Blocks and rows of the stage are borrowed until it returns; no other thread may use them.
    """
    if len(configs) == 1:
        return run_self_test(make_stage, *configs.values(), clock=clock)
    return reported(lambda: _Canaries(configs, clock).run(make_stage))


class _Canaries:
    def __init__(self, configs: Mapping[str, ClientConfig], clock: Callable[[], float]) -> None:
        self._clock = clock
        self._configs = configs
        self._tests: dict[str, SelfTest] = {}
        self._clients: dict[str, RemoteClient] = {}
        self._passed: list[str] = []
        self._failed: dict[str, str] = {}

    def run(self, make_stage: Callable[[], Fixture]) -> Report:
        try:
            stage = make_stage()
        except ValueError as error:
            raise Skip(str(error)) from error
        io = IoThread()
        try:
            for name, config in self._configs.items():
                test = SelfTest(config, RemoteClient, self._clock)
                self._tests[name] = test
                self._clients[name] = RemoteClient(test.config, io=io)
                test.connect(stage, self._clients[name])
            with stage.borrowed():
                stage.write_pattern()
                stage.store()
                self._visit_all(stage)
        finally:
            self._tidy(io)
        return self._report()

    def _visit_all(self, stage: Fixture) -> None:
        """The servers in the order in which they answer."""
        waiting = dict(self._clients)
        ends_at = min(test.ends_at for test in self._tests.values()) - TIDYING_S
        while waiting and self._clock() < ends_at:
            waiting = {name: one for name, one in waiting.items() if not one.absent}
            ready = next((name for name, one in waiting.items() if one.ready), None)
            if ready is None:
                time.sleep(LOOK_AGAIN_S)
                continue
            # One that stops now leaves half of the time to the others.
            now_s = self._clock()
            self._tests[ready].ends_at = now_s + (ends_at - now_s) / 2 + TIDYING_S
            self._visit(ready, waiting.pop(ready), stage)

    def _visit(self, name: str, client: RemoteClient, stage: Fixture) -> None:
        for row in stage.target_rows():
            row[:] = bytes([0x5A]) * row.nbytes
        try:
            self._tests[name].there_and_back(stage, client)
        except Skip as reason:
            logger.debug("start-up canary of %s skipped: %s", name, reason)
        except Differs as difference:
            self._failed[name] = str(difference)
        else:
            if not self._passed:
                stage.load()
                compare_pages(stage.sources(), stage.targets())
            self._passed.append(name)

    def _report(self) -> Report:
        skipped = len(self._configs) - len(self._passed) - len(self._failed)
        parts = [f"{len(self._passed)} servers passed, {skipped} did not answer"]
        parts += [f"{name} failed: {why}" for name, why in self._failed.items()]
        outcome = Outcome.PASSED if self._passed else Outcome.SKIPPED
        if len(self._failed) == len(self._configs):
            outcome = Outcome.FAILED
        return Report(outcome, "; ".join(parts), failed=tuple(self._failed.items()))

    def _tidy(self, io: IoThread) -> None:
        """Also sent to a server that has not replied yet."""
        with suppress(Exception):
            cleared = [self._tests[name].clear(one) for name, one in self._clients.items()]
            wait(cleared, timeout=TIDYING_S)
        for client in self._clients.values():
            client.close(0)
        io.close(TIDYING_S)
