"""Holds conversations with the policy: episodes with environments, tools and agents, and the agents' endpoint."""
