"""Scores rollouts by reward functions in processes beside the ranks, and by environments."""
