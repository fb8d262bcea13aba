"""Where a run begins, what it saves, and whether it may go on."""
