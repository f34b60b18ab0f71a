"""What an engine has of the connector, without an engine: for what no small CPU can compute."""
