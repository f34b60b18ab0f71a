"""Runs: the stretches of a prompt that a fleet places, each on servers of its own.

A prefix is of use up to its first missing block. Placed block by block, almost every prompt would
end at a lost server. Runs that double keep a prompt on few servers, and spread long prompts and
common beginnings over all of them.
"""

FIRST_RUN_TOKENS = 1024
"""Run 0 has so many tokens; run k begins at `1024 * 2 ** (k - 1)` and has as many."""


def run_of(end: int) -> int:
    """The run of the row whose last token is number `end - 1`, counted from zero."""
    return ((end - 1) // FIRST_RUN_TOKENS).bit_length()


def end_of(run: int) -> int:
    """Tokens of a prompt up to the end of this run."""
    return FIRST_RUN_TOKENS << run


def begins_run(start: int, end: int) -> bool:
    """Whether the row with the tokens from `start` to before `end` is the first of its run. Its key
    is the *anchor* of the run: equal for all prompts that are equal up to there."""
    return start == 0 or run_of(start) != run_of(end)
