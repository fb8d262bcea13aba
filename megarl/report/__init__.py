"""What runs have left in their folders, as one page that needs nothing else. Torch-free.

The page is made of blocks: JSON values, compressed, each with a name. A file holds them all; a live page fetches those
that have changed.
"""
