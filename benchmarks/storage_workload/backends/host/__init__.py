"""The server's store in this process: memory above disk, each device call timed."""
