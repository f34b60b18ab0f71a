"""Age and budget: removal and renewal of packs."""
