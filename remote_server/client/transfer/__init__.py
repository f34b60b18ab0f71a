"""State machines of puts and gets, which all transports share."""
