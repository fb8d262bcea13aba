"""Conversations with the policy: episodes with environments, tools and agents, and the endpoint that agents ask."""
