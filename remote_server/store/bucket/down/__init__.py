"""The way down to the bucket: which packs are written."""
