"""The parts that all benchmarks share: measure, judge, record, show.

runner      trials of several variants, interleaved
summary     the median and range of a sample
statistics  percentiles, and tests of whether two samples differ
record      one run as JSON, and reading it back
compare     a verdict on two records
table, plot text and pictures
registry    the benchmarks of the tree, and the documents of benchmarks/sources
source      the figures of such a document, as data
page        all records and the sources' figures as one HTML page; page_tables has its tables
options     the flags that all benchmarks have
steps       commands one after another, each with a log and a limit of time
files       checks and operations on files
machine     a description of the machine, and checks against its free memory
"""
