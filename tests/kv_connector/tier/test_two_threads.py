"""vLLM calls the tier from several threads, one at a time.

Since 0.33 its manager has a lock. A thread that serves another engine between two steps takes it,
and looks that engine's keys up in every tier.
"""

import threading
import time

from scripted_client import TOKENS_PER_BLOCK
from tiered_engine import PATIENCE_S, TieredEngine, key_of, ready, real_engine
from vllm.v1.kv_offload.base import ReqContext

from examples.processes import RemoteServer

PROMPTS, ROWS_EACH = 12, 8


def numbers_of(prompt: int) -> range:
    return range(prompt * ROWS_EACH, (prompt + 1) * ROWS_EACH)


class OtherThread(threading.Thread):
    """Looks up all prompts in turn, as for a peer, until it is ended."""

    def __init__(self, engine: TieredEngine, lock: "threading.Lock") -> None:
        super().__init__()
        self._engine = engine
        self._lock = lock
        self.ends = threading.Event()
        self.found = 0
        self.error: BaseException | None = None

    def run(self) -> None:
        manager = self._engine.manager
        try:
            for number in range(1_000_000):
                context = ReqContext(f"peer {number}")
                keys = [key_of(n) for n in numbers_of(number % PROMPTS)]
                for i, key in enumerate(keys):
                    context.set_offload_key_position(key, (i + 1) * TOKENS_PER_BLOCK)
                with self._lock:
                    manager.on_new_request(context)
                    self.found += sum(
                        manager.lookup(key, context).name in ("HIT", "HIT_PENDING") for key in keys
                    )
                    manager.on_request_finished(context)
                if self.ends.is_set():
                    return
                time.sleep(0)  # the lock is not fair
        except BaseException as error:
            self.error = error


def test_lookups_of_another_thread_between_its_steps_harm_no_job_of_an_engine():
    """Prompts that do not fit the pool together are stored, and loaded again and again."""
    with RemoteServer("64MiB") as server:
        engine = ready(real_engine(server.endpoint, num_rows=40))
        lock = getattr(engine.manager, "lock", None) or threading.Lock()
        other = OtherThread(engine, lock)
        other.start()
        try:
            for prompt in range(PROMPTS):
                with lock:
                    engine.compute(f"computed {prompt}", numbers_of(prompt))
                until_idle(engine, lock)
            for number in range(3 * PROMPTS):
                assert found_by(engine, lock, number) == ["HIT"] * ROWS_EACH
        finally:
            other.ends.set()
            other.join()
        assert other.error is None
        assert other.found, "it came to the tier"
        until_idle(engine, lock)
        engine.check()
        engine.manager.shutdown()


def until_idle(engine: TieredEngine, lock: "threading.Lock") -> None:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        with lock:
            if not engine.manager.has_pending_work():
                return
            engine.step()
        assert time.monotonic() < deadline, "work is left"
        time.sleep(0.001)


def found_by(engine: TieredEngine, lock: "threading.Lock", number: int) -> list[str]:
    """What a request of the engine finds in the end, with its own steps."""
    with lock:
        context, keys = engine.request(f"r{number}", numbers_of(number % PROMPTS))
    deadline = time.monotonic() + PATIENCE_S
    while True:
        with lock:
            found = engine.lookup(context, keys)
            engine.step()
            if not {"RETRY", "HIT_PENDING"} & set(found):
                engine.manager.on_request_finished(context)
                return found
        assert time.monotonic() < deadline, f"still deferred: {found}"
        time.sleep(0.001)
