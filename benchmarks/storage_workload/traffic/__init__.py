"""Traffic: which requests do users send, made up or recorded?"""
