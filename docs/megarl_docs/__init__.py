"""Text of the documentation that comes from the code. Each function gives Markdown."""
