"""Links: what do more lanes give, and what do delay and loss cost?"""
