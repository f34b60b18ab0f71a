"""Many users on one KV cache: how many can this machine serve, and where is the bottleneck?

    python -m benchmarks.storage_workload --scenario quick

A workload of users with conversations, or a recorded trace, against this project's own store. The
modules, from the inside out:

models, personas, entries   the size of a token, the kinds of users, a request's cache entries
requests, traces            the requests of each user, from a seed; and recorded ones
payload                     incompressible bytes, made at the speed of a copy
backend                     the driver's interface to a store; `emulated` ones of known speed
store_host, host_*, turns   the server's own store in this process, on a thread of its own;
                            `host_cascade` keeps a block in one tier, as the source does
measured_disk, device_times, device_io   its disk, with the times of each block on the device
gpu_tier, row_table, device_rows   memory of a GPU above any of them
device_library                     CuPy or torch, whichever reaches a GPU
wire                        a server, through the ordinary client
driver, slots               users that wait for their answers, or arrivals at fixed times
autoscale, scaling          the number of users: the decision, and its execution
precondition                the disk written once before a run
progress                    the progress line of a run
samples, summary, verdict   the measurements, all figures from them, the criteria
steady                      whether the throughput was constant at the end
accounting                  the tiers' counts against arithmetic
document, validation        the JSON of a run; comparison with a recorded trace
report, conditions          text; and its section on the device and its state
plots, page                 charts and a page
options, flags, scenarios   the command line
suite, comparison           many runs, and a table of them
trials, resume              one run several times; runs of an earlier sequence that are kept
"""
