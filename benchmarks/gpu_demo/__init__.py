"""vLLM on a GPU: do all levels work here, with equal answers, and what do they cost and gain?

plan    the steps: their commands, by what the machine has
report  verdicts, and the page that can be sent
"""
