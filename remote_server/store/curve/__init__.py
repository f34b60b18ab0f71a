"""Miss-ratio curves: what caches of other sizes would find, and why prompts were not found."""
