"""Transfers in the shape of real models: the bytes and blocks of a prompt's KV cache, and the times
of their transfer over each way that this machine has.

models, configurations  known shapes of models, and settings of an engine
plan                    the arithmetic: bytes per token, bytes per block, blocks per transfer
transfer                one transfer in stages that add up to its time, with a bounded window
ways                    memory, shared memory, tcp; files in file_ways, NIXL in nixl_ways, a GPU's
                        memory in device_ways; making has them by name
measure                 the ways in interleaved trials; report shows the results
"""
