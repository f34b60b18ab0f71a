"""Models of caches: what do a server, a pool and a policy hold, and what could any?"""
