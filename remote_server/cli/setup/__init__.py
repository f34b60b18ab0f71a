"""Commands that write files and scripts for a host: `init`, `keys`, `completion`."""
