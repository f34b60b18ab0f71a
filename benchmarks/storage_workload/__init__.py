"""Many users on one KV cache: how many can this machine serve, and where is the bottleneck?

    python -m benchmarks.storage_workload --scenario quick

A workload of users with conversations, or a recorded trace, against this project's own store.
The folders, from the inside out:

traffic     the requests of each user, from a seed; and recorded ones
backends    the stores below the load: `host` the server's own in this process, each call of its
            disk timed; `gpu` memory of a GPU above any; `wire` a server, through the ordinary
            client; `emulated` ones of known speed
figures     the raw measurements, all figures from them, the tiers' counts against arithmetic
load        users that wait for their answers, or arrivals at fixed times; the number of users
plan        the command line
pages       the JSON of a run, its verdict, text, charts and page
runs        one run, a suite of many, one several times, and what is kept of earlier ones
"""
