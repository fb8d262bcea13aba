"""The models of a run with their duties: actor and reference."""
