"""Keeps the records of a run: metrics, progress, samples, timeline, memory."""
