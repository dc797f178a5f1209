"""Curves of training runs as PNG files: ``training`` draws one run, ``overlay`` several. A door to matplotlib."""
