"""A comparison of stores: ours, files, Redis, memcached, LMCache, Mooncake, NIXL and others.

catalogue       the rows: each system's server, its client, its use of memory
systems         the interface of a system, and memory and files as systems
clients         a system's clients: one in this process, or several processes at once
ours            our server over shared memory and over tcp, its disk for cold reads
peers           Redis, memcached, LMCache, Mooncake, NIXL and others, each by its own software
hosts           a run over several hosts
shared_prefix   sessions with a common prefix, which is stored once
"""
