"""The plan of a run: options, flags, named scenarios, and this machine's hardware."""
