"""Ranks, layouts and process groups."""
