"""The wall clock, read for people: `kvferry doctor` compares it with the client's.

No decision may depend on it: it can jump by hours. Durations are measured by `monotonic`.
"""

import time


def wall_time_s() -> float:
    """Seconds since 1970, by this machine's clock."""
    return time.time()
