"""Pages: what is shown of the committed records, and whether it is still true."""
