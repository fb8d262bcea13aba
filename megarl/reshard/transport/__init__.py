"""Ways for planned bytes to travel: `local` within a rank, `collective` over a process group."""
