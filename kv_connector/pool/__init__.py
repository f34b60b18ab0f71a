"""The CPU pool: its file, its rows, and the workers that copy between it and the engine."""
