"""How the batch of a step comes about: responses, episodes, scores; and validation."""
