"""Responses to prompts, scored and made a batch of; and validation."""
