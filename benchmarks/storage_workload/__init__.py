"""Many users on one KV cache: how many can this machine serve, and where is the bottleneck?

    python -m benchmarks.storage_workload --scenario quick

A workload of users with conversations, or a recorded trace, against this project's own store. What
is here, from the inside out:

models, personas, entries   how large a token is, who asks, what a request has in the cache
requests, traces            the requests of each user, from a seed; and those that were recorded
payload                     bytes that nobody can compress, made as fast as they are copied
backend                     what the driver needs of a store; `emulated` ones of known speed
store_host, host_*, turns   the server's own store in this process, on a thread of its own;
                            `host_cascade` has a block in one tier, as the source does
measured_disk, device_times, device_io   its disk, and when the device had which block
gpu_tier, row_table, device_rows   memory of a GPU above any of them
device_library                     CuPy or torch, whichever reaches a GPU
wire                        a server, through the ordinary client
driver, slots               users that wait for their answers, or arrivals that do not
autoscale, scaling          how many users: the decision, and who carries it out
progress                    how far a run is
samples, summary, verdict   what was measured, every figure of it, PASS or FAIL
accounting                  what the tiers hold against what they were given
document, validation        all of it as JSON; beside a recorded trace
report, plots, page         for people
options, flags, scenarios   the command line
suite, comparison           many runs, and a table of them
"""
