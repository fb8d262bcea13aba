"""Describes the parts of a layer, one file each: attention and MLP in Hugging Face files, in training, in the engines.

A file says all that the program knows of a kind of attention or of MLP before it runs: its weights, where each rank
holds them, the memory and the FLOPs that it takes, and Megatron-Core's fields for it. `megarl.models.architecture`
makes layers of the parts. The files are torch-free.
"""
