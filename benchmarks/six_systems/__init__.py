"""What would keep these blocks best: ours, shared memory, files, HDF5, Redis, vLLM's files, a GPU?

systems        the interface, and those that are plain memory and files
others         HDF5, Redis, vLLM's fs tier, a GPU, LMCache: the real software, or SKIPPED
ours           our server over shared memory and over tcp, its disk for cold reads
shared_prefix  sessions with a common beginning: what is stored once
"""
