"""The index: what this server knows of the bucket."""
