"""What every benchmark shares: measure, judge, record, show.

runner      trials of several variants, interleaved
statistics  what the trials say, and whether two samples differ
record      one run as JSON, and reading it back
compare     the verdict on two records
table, plot for people
registry    which benchmarks there are, and the documents of benchmarks/sources
source      what such a document reports, as data
page        all records and what the sources report, as one HTML page; its tables are page_tables
options     the flags that all benchmarks have
files       what ways through files have in common
machine     where this ran, and whether something fits into its memory
"""
