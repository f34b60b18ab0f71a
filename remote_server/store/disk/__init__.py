"""The disk tier: copies of the blocks of memory that survive eviction, a kill and a restart.

Format. One directory holds segments and a README.txt for people. Locks on the directory and on the
file LOCK keep a second server out. A segment is one large preallocated file, numbered, for one
namespace and one block size: a header page, then equal slots. A slot is a header page and a block's
bytes, in whole pages, so that both can bypass the page cache (O_DIRECT) and a run of neighbours is
one call. The slot's header holds the block's key, length, checksum (XXH3-64 seeded with namespace
and key, as on the wire), a generation, its chain fields, and the segment's own random number. The
segment's header holds the namespace. The last 8 bytes of each header page are its checksum. No file
name contains data from the network.

Only whole slots are overwritten, and headers that are erased. A segment's header is written once,
before the file gets its name; a segment that changes hands is removed and another one made. So
there is no log, no index file, and no pair of writes that must stay consistent.

Recovery. A block is a header and bytes that match their checksums. After a start,
    1. segment headers are read, at once: namespaces, block sizes, and bytes of the budget;
    2. slot headers are read in the background, all segments in parallel. Of two blocks with one
       key the higher generation counts; the other keeps its slot until that one has been hashed,
       because a kill may have torn it. Until the last header of a namespace is read, a lookup in
       it returns PENDING instead of ABSENT. From then on recovered blocks can be evicted;
    3. bytes are read and hashed in the background, newest first. Until then a lookup returns
       PENDING and moves the block to the front; afterwards READABLE or ABSENT.
So READABLE means that this process hashed or wrote the block, and step 3 may take minutes without
delaying any request. New blocks are stored meanwhile. Step 2 reads a page a block. While it runs,
a full directory has no room: its oldest slots are not known before the end.

Losses. Header and bytes of a block are written in one call. A kill during the call makes a slot
whose checksums fail: a free slot. So kill -9 loses the blocks whose writes had not ended, and the
blocks in their slots before, which had been evicted. A power cut or a kernel crash loses in
addition all writes that the device had not made permanent: the tier does not wait for that
(fdatasync) after each write, because a cache may lose blocks but not serve wrong ones, and the
checksums do not depend on the order of writes. The segment itself is made permanent before it is
used. A clear removes files, and is answered when the directory is permanent without them: from
then on no crash brings cleared blocks back. A block that is removed or replaced is erased (its
header overwritten) before its slot is free; until then a crash can bring it back. An evicted block
can come back until its slot is overwritten. A block that comes back has the bytes that were put
under its key.

Budget. Files are made at their full size and counted by it, headers included, so they never exceed
the budget; a segment is removed before its successor is made. If the budget was made smaller, the
segments with the oldest blocks are removed first at start.

Threads. One thread, the server's loop, owns the tier and calls it; no lock. Reads and writes run on
a few I/O threads, reads first. A job has `work`, which runs there and touches only bytes and files,
and `finish`, which runs on the loop. A block is pinned while it is read.

    layout        names of files, pages of headers: to bytes and back, no I/O
    files         a file, a folder, aligned memory: positioned vectored I/O, O_DIRECT or not
    folder        the directory: private, and locked by one server
    finding       its segments and their slot headers, read at start
    pool          I/O threads that all tiers share, and the jobs of one tier
    segments      the accounting of segments and slots; no I/O
    index         blocks by key, and their removal
    allocator        segments made, taken, removed, by the demand of each namespace
    transfers     work on I/O threads: files made and removed, runs of neighbours moved
    block_io      writes and reads of blocks, on the loop
    recovery      steps 2 and 3
    tier          the tier as the server's store calls it; opening: on a real directory
"""
