"""What samples of a model say about it: estimates with their uncertainty, per data source. Torch-free."""
