"""Commands that check and measure a host and its servers: `doctor`, `bench`."""
