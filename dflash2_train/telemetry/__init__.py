"""What a run records besides its losses: speed, work, memory, gradients. The guide is ``README.md`` in this folder."""
