"""The drafter: published shape, attention, block convolution, candidate selector and their assembly.

Nothing is imported here, so that reading a shape (``drafter_config``) does not load torch.
"""
