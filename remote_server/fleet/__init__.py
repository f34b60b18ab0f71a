"""Several independent cache servers behind one setting."""
