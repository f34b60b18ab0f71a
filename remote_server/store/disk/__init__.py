"""The disk tier: copies of the blocks of memory that survive eviction, a kill and a restart.

docs/disk.md has the format, recovery, losses and the budget.

    layout        names of files, pages of headers: to bytes and back, no I/O
    files         a file, a folder, aligned memory: positioned vectored I/O, O_DIRECT or not
    finding       its segments and their slot headers, read at start
    pool          I/O threads that all tiers share, and the jobs of one tier
    segments      the accounting of segments and slots; no I/O
    index         blocks by key, and their removal
    allocator        segments made, taken, removed, by the demand of each namespace
    transfers     work on I/O threads: files made and removed, runs of neighbours moved
    block_io      writes and reads of blocks, on the loop
    recovery      steps 2 and 3 of a start
    tier          the tier as the server's store calls it
    opening       the tier on a real directory, private and locked by one server
"""
