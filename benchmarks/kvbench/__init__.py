"""Transfers in the shape of real models: how many bytes a prompt's KV cache has, in how many
blocks, and how long those take over each way that this machine has.

models, configurations  what is known: shapes of models, and how an engine is set up
plan                    the arithmetic: bytes per token, bytes per block, blocks per transfer
transfer                one transfer in stages that add up to its time, with a bounded window
ways                    memory, shared memory, tcp; files in file_ways, NIXL in nixl_ways, a GPU's
                        memory in device_ways; making has them by name
measure                 ways against each other, interleaved; report is for people
"""
