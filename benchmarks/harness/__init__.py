"""What every benchmark shares: measure, judge, record, show.

runner      trials of several variants, interleaved
statistics  what the trials say, and whether two samples differ
record      one run as JSON, and reading it back
compare     the verdict on two records
table, plot for people
options     the flags that all benchmarks have
machine     where this ran, and whether something fits into its memory
"""
