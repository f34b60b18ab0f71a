"""The parts that all benchmarks share: measure, judge, record, show.

runner      trials of several variants, interleaved
summary     the median and range of a sample
statistics  percentiles, and tests of whether two samples differ
record      one run as JSON, and reading it back
compare     a verdict on two records
table, plot text and pictures
options     the flags that all benchmarks have
files       checks and operations on files
machine     a description of the machine, and checks against its free memory
source      the figures of a source document, as data
commands    the benchmarks of the tree and their names, run one after another or again
pages       what is shown of records: pages, the READMEs' tables, goals and claims
"""
