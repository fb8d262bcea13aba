"""Works out what a run holds, moves and takes before it starts: `megarl plan` and the check of memory."""
