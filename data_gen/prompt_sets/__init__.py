"""Prompts that ship with the package; read through ``importlib.resources``."""
