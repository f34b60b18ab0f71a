"""A sweep of a server's load: conversations carried, and the latency of replies meanwhile.

conversation  one conversation: 7 lookups, 6 streamed reads, 3 writes
talkers       a process of clients, each with one conversation after another
slow_server   the real server with an emulated storage behind its gets
sweep         rounds of a sweep: processes times clients, samples pooled
points        inputs and results of a sweep, and both as CSV
figures       the same as figures of a record
spare         verdicts on spare cores and flat lookups
operating     operating points, and the number of servers for a load
page, charts  one HTML page that needs nothing else
source        the figures of the source document
"""
