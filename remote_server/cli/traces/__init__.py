"""Commands that record requests and try caches on them: `record`, `advise`."""
