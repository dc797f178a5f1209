"""Tasks, draft lengths and temperatures with the built-in runner: every combination a cell of one report."""
