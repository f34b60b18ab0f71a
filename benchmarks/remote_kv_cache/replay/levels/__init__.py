"""Levels: on which one is each requested block found?"""
