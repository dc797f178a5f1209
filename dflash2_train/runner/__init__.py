"""Speculative decoding in plain PyTorch: propose a block, verify it with the target, commit, repeat."""
