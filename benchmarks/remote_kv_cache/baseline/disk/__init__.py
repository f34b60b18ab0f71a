"""Disk: how near is the tier to the device, and what does a busy disk cost a get?"""
