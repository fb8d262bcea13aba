"""Runs vLLM as a generation engine in the trainer's own processes."""
