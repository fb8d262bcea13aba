"""Arranges ranks in layouts and process groups."""
