"""What would keep these blocks best: ours, files, Redis, memcached, LMCache, Mooncake, NIXL?

catalogue       the rows: what serves each system, its client, the memory that it takes
systems         the interface, and the systems that are memory and files
clients         a system's clients: one in this process, or several processes at once
ours            our server over shared memory and over tcp, its disk for cold reads
redis           one process, or a cluster of three
memcached       over tcp and a unix socket, by two clients
lmcache_server, lmcache_shared, lmcache_disk
                its server, its multiprocess server, its disk backend; lmcache_library for all three
mooncake        the Mooncake store's master, memory and client
nixl            a file, and another process's memory (nixl_target)
others          HDF5, vLLM's fs tier, a GPU, PDC
shared_prefix   sessions with a common beginning: what is stored once
"""
