"""A sweep of a server's load: conversations carried, and the latency of replies meanwhile.

load        conversations of client processes, and the servers and buckets that they load
points      inputs and results of a sweep, and both as CSV
figures     the same as figures of a record
spare       verdicts on spare cores and flat lookups
operating   operating points; `plan` has the number of servers for a load
pages       one HTML page that needs nothing else, its charts, and lines of text
source      the figures of the source document
"""
