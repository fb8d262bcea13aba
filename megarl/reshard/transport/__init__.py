"""Ways for planned bytes to travel: `local` within a rank, `peer` within a host, `collective` over a process group."""
