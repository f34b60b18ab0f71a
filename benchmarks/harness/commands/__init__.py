"""Commands: names of benchmarks, the programs they run, and their records made again."""
