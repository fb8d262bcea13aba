"""Generates responses to prompts, scores them and makes a batch of them; validates, too."""
