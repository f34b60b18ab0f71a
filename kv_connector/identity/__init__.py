"""Facts that must be equal for engines to share blocks: namespace, weights, reports, canary."""
