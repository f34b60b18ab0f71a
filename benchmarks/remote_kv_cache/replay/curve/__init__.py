"""The live curve: how far is it from full replays, and what does it cost?"""
