"""Parts of the connector that act at an engine's start, steps and resets."""
