"""Transfers into an engine and out of it: figures, tables and plots of the passes."""
