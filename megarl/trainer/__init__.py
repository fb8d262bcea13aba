"""Checks a run, makes its steps and ends it. No tensor maths."""
