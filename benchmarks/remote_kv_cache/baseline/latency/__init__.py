"""Latency: how long do lookups and small blocks take, also beside others' streams?"""
