"""How many conversations does a server carry, and what do its answers cost meanwhile?

conversation  what one of them asks: 7 lookups, 6 streamed reads, 3 writes
talkers       a process of clients, each with one conversation after another
slow_server   the real server, with an emulated storage behind its gets
sweep         rounds of a sweep: processes times clients, samples pooled
points        what a sweep varies and what comes out of it, and both as CSV
figures       the same as figures of a record
spare         whether cores were to spare, and whether lookups stayed flat
operating     which point to run at, and how many servers that takes
page, charts  one HTML page that needs nothing else
source        the figures of the document that this sweep is from
"""
