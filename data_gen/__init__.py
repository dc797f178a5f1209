"""Training data of a drafter: prompts, answers written by the target, and the target's states for them."""
