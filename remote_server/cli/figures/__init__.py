"""Commands that show the statistics of servers: `stats`, `watch`, `top`."""
