"""The capture cache: the one thing that data generation and training share."""
