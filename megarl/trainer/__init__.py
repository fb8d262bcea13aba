"""The loops: supervised warm-up, RL steps, validation. No tensor maths."""
