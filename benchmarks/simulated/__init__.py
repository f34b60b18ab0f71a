"""A simulated engine around the real connector, for models that no small CPU can compute."""
