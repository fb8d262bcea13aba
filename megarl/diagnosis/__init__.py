"""What a machine has, and what a run would stumble over there."""
