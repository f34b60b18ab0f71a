"""Many users on one KV cache: how many can this machine serve, and where is the bottleneck?

    python -m benchmarks.storage_workload --scenario quick

A workload of users with conversations, or a recorded trace, against this project's own store. What
is here, from the inside out:

models, personas, entries   how large a token is, who asks, what a request has in the cache
requests, traces            the requests of each user, from a seed; and those that were recorded
payload                     bytes that nobody can compress, made as fast as they are copied
backend                     what the driver needs of a store; `emulated` ones of known speed
store_host, host_*, turns   the server's own store in this process, on a thread of its own
measured_disk, device_*     its disk, and when the device had which block
wire                        a server, through the ordinary client
driver, slots               users that wait for their answers, or arrivals that do not
autoscale, scaling          how many users: the decision, and who carries it out
samples, summary, verdict   what was measured, every figure of it, PASS or FAIL
accounting                  what the tiers hold against what they were given
report, plots, page         for people
options, scenarios, suite   the command line
"""
