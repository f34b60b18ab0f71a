"""Commands about blocks: `why`, `clear`, `pin`, `unpin`, and `bucket` about those of a bucket."""
