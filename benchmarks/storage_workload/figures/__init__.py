"""Figures: what was measured, and does it agree with its own arithmetic?"""
