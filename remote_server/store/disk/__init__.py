"""The disk tier: blocks that memory has no room for, still there after a kill or a restart.

What is on disk. One directory of ours, with a README.txt for people and segments; two servers
never share it, because its descriptor is a lock, and the file LOCK as well. A segment is one
large preallocated file, numbered, that belongs to one namespace and one block size: a header
page, then equal slots. A slot is a header page and a block's bytes, rounded up to whole pages,
so that both can be moved past the page cache (O_DIRECT) and a run of neighbours is one call. The
slot's header holds the block's key,
length, checksum (XXH3-64 seeded with namespace and key, the one that travels on the wire), a
generation, and the segment's own random number; the last 8 bytes of each header page are its
checksum. The namespace stands in the segment's header. No file name is built from what came
over the network.

Nothing is ever changed in place but whole slots, and headers that are erased. A segment's header
is written once, before the file gets its name; a segment that changes hands is removed and
another one made. So there is no log, no index file, and nothing that two writes must keep
consistent.

What counts as a block: header and bytes that agree with their checksums. After a start,
    1. segment headers are read, at once: whose they are, and how much of the budget they take;
    2. slot headers are read in the background, all segments in parallel; of two blocks with
       one key the higher generation counts, and the other keeps its slot until that one has been
       hashed: a kill may have torn it. Until the last header of a namespace was read, a lookup
       in it says PENDING instead of ABSENT. From here on recovered blocks can be evicted;
    3. bytes are read and hashed in the background, newest first. Until that was done a lookup
       says PENDING, and moves the block to the front; then READABLE, or ABSENT.
So a lookup claims nothing that was not hashed in this process or written by it, and step 3 may
take minutes without keeping anybody waiting. New blocks are stored during all of it. Step 2
reads a page a block. While it runs in a full directory, there is no room: which slots are the
oldest is not known before it ends.

What can be lost. A slot is free, or it is being written, or its block was written: header and
bytes in one call. A kill in the middle of that call leaves a slot whose checksums fail: a free
slot. So kill -9 loses the blocks whose writes had not ended, and with them what they were
replacing in that slot, which had been evicted before. A power cut, or a crash of the kernel,
can lose in addition what the device had not made permanent; this tier does not wait for that
(fdatasync) after each write, because a cache may lose blocks; it may not serve wrong ones, and
the checksums do not depend on the order in which writes arrive. The segment itself is made
permanent before it is used. A clear removes files, and is answered when the directory has been
made permanent without them: from then on no crash brings cleared blocks back. A block that
was removed or replaced is erased (its header overwritten) before its slot is reused or free;
until that was written, a crash can bring it back, too. What was evicted can come back until its
slot has been overwritten. Whatever comes back has the bytes that were put under its key.

Budget. Files are made at their full size and counted by it, headers included, so files on disk
never exceed the budget; a segment is removed before its successor is made. If the budget was
made smaller, the segments with the oldest blocks go before anything else happens.

Threads. One thread, the server's loop, owns the tier and calls it; no lock. Reads and writes run
on a few I/O threads (`threads`), reads first; a job has `work`, which runs there and touches only
bytes and files, and `finish`, which runs on the loop. A block is pinned while it is read.

    layout        the pages of headers: to bytes and back, no I/O
    files         a file, a folder, aligned memory: positioned vectored I/O, O_DIRECT or not
    names         what files are called
    folder        the directory: private, and taken by one server
    finding       the segments in it, looked at once at start
    age_clock     the time that generations are made of
    pool          the jobs of one tier, and their way back to the loop
    threads       I/O threads that all tiers share, and whose job is next
    segments      which slot is free and who leaves next; index: where a block is found; no I/O
    transfers     pieces of neighbours to and from a file, one call each
    writing       blocks on their way to disk; reading: from it; leaving: out of the index
    growth        room: segments made, taken, removed; housekeeping: the files of that
    demand        how much room each namespace wanted
    admission     which blocks of memory are worth a write
    recovery      steps 2 and 3; adoption: what becomes of what they find
    tier          what the server's store sees; opening: on a real directory
"""
