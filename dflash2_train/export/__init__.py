"""From a trained drafter to a folder that inference servers load: writing, reading back, checking, describing."""
