"""The clock that people set, read for people: `kvferry doctor` compares it with theirs.

Nothing may be decided by it: it can jump by hours. What has to last is timed by `monotonic`.
"""

import time


def told_to_people() -> float:
    """Seconds since 1970, as this machine believes."""
    return time.time()
