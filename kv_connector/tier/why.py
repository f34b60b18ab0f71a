"""One line about a request, for the engine's log at debug level: what it could wait for, and what
became of that."""

from collections import Counter

from kv_connector.tier.lookup_state import LookupState, Missed
from remote_server.protocol import KeyState


def why(request_id: str, wait: LookupState) -> str:
    """`wait` is that of a request which the engine admits."""
    states = Counter(wait.states.values())
    found = [f"{states[KeyState.READABLE]} of {len(wait.states)} blocks from the server"]
    found += [f"{number} {state}" for state, number in states.items() if isinstance(state, Missed)]
    return (
        f"request {request_id}: computing takes {wait.computes_s:.3g} s, so it may wait "
        f"{wait.budget_s:.3g} s; it waited {wait.owed_s:.3g} s for replies, {wait.waited_s:.3g} s "
        f"in {wait.waited_steps} steps in all; {', '.join(found)}"
    )
