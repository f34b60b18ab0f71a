"""A comparison of stores: ours, files, Redis, memcached, LMCache, Mooncake, NIXL and others.

catalogue       the rows: each system's server, its client, its use of memory
systems         the interface of a system, and memory and files as systems
clients         a system's clients: one in this process, or several processes at once
ours            our server over shared memory and over tcp, its disk for cold reads
redis           one process, or a cluster of three
memcached       over tcp and a unix socket, by two clients
lmcache_server, lmcache_shared, lmcache_disk
                its server, its multiprocess server, its disk backend; lmcache_library for all three
mooncake        the Mooncake store's master, memory and client
nixl            a file, and another process's memory (nixl_target)
others          HDF5, vLLM's fs tier, a GPU, PDC
shared_prefix   sessions with a common prefix, which is stored once
"""
