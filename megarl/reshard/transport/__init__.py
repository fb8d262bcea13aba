"""Moves planned bytes: `local` within a rank, `peer` within a host, `collective` over a process group."""
