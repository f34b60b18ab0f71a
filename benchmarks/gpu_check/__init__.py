"""A GPU without vLLM: are pools page-locked there, how fast are copies, and does all else work?

checks        the list of checks: their commands, what each needs, and how each is judged
judging       a verdict from the record and the log that a check has left
session       the checks in order, within a budget; the record after each
device        the device of the copies: a GPU, or a CPU in its place
registration  page-locking of a pool that another process has made
pool_holder   that process
copies        copies between rows and engine blocks, in the layouts that vLLM uses
layouts       those layouts
mover         the mover's copies on this host, by threads
"""
