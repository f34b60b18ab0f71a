"""What would keep these blocks best: ours, a shared map, files, HDF5, Redis, LMCache, vLLM's files?

systems        the interface, and those that are plain memory and files
others         HDF5, Redis, vLLM's fs tier, a GPU: the real software, or SKIPPED
lmcache_server LMCache's own server and its own client, or SKIPPED
ours           our server over shared memory and over tcp, its disk for cold reads
shared_prefix  sessions with a common beginning: what is stored once
"""
