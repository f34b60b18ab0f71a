"""Commands that run servers and end them: `serve`, `drain`."""
