"""Measuring a drafter: hold-out prompts through the built-in runner, counted, timed and reported."""
