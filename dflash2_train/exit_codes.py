"""Exit codes behind which the same command continues; a launch script starts it again."""

EXIT_STOPPED = 143  # saved and left in good order before the last step: a signal, or a limit in time
EXIT_LOST_RANK = 75  # another rank is gone without a word, or did not meet this one in time
EXIT_STALLED = 76  # no step for train.guard.stall_exit_seconds

LOST_CODES = (EXIT_LOST_RANK, EXIT_STALLED)  # nothing was saved for it: the newest checkpoint is what continues
CONTINUED_CODES = (EXIT_STOPPED, *LOST_CODES)
