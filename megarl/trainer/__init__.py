"""A run: its checks, its steps, its end. No tensor maths."""
