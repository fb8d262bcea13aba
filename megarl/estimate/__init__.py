"""What a run holds, moves and takes, worked out before it starts: `megarl plan` and the check of memory."""
