"""Runs a flow: roles join the run, its loops make steps, and its ranks agree."""
