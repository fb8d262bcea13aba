"""Makes the report: one page of what runs wrote into their folders, which needs only a browser. Torch-free.

The page consists of blocks: named, compressed JSON values. A file holds all of them; a live page fetches the changed
ones.
"""
