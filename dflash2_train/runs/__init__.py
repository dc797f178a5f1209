"""``dflash2-runs``: what lies in run folders. ``folder`` reads them, ``compare`` sets them beside each other."""
