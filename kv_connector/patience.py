"""Deadlines of lookups and loads, in proportion to the engine's steps.

An engine uses an answer when its next step begins. On an engine whose steps take half a second a
lookup that is given up after 50 ms gains nothing, and loses the blocks of a server that needed 60
on a busy host. So no deadline is shorter than most of a recent step.
"""

from dataclasses import dataclass

from kv_connector.config import RemoteConfig
from kv_connector.speeds import EngineSpeed

# A deadline at the very end of a step would be noticed one step later.
SHARE_OF_A_STEP = 0.8

# However long the steps are: a server that does not answer for a second is away.
LONGEST_S = 1.0


@dataclass(frozen=True)
class Patience:
    """The deadlines for what is asked now. The scheduler thread alone uses it."""

    config: RemoteConfig
    engine: EngineSpeed

    @property
    def lookup_s(self) -> float:
        """`lookup_timeout_ms`, or most of a step if that is longer."""
        return self._at_least(self.config.lookup_timeout_ms)

    @property
    def load_stall_s(self) -> float:
        """`load_stall_ms`, or most of a step if that is longer."""
        return self._at_least(self.config.load_stall_ms)

    def _at_least(self, milliseconds: float) -> float:
        step_s = self.engine.step_s or 0.0
        return max(milliseconds / 1000, min(SHARE_OF_A_STEP * step_s, LONGEST_S))
