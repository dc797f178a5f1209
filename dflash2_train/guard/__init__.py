"""What keeps a job of many ranks from waiting for one that will not come.

    status.py    what each rank tells of itself in ``logs/rankN/status.json``, and who is lost by what the others told
    watchdog.py  a thread a rank: gives signs of life, writes stacks when no step ends, ends the rank when that lasts
    watch.py     around all that a rank does: whatever ends it is told to the others, and a failed collective is turned
                 into one line that names the lost rank

A rank that dies takes the job with it: the others end with the cause and an exit code behind which the same command
continues from the last checkpoint (:mod:`dflash2_train.run_control`).
"""

from dflash2_train.guard.status import LostRankError, RankStatus
from dflash2_train.guard.watch import watched
from dflash2_train.guard.watchdog import Watchdog

__all__ = ["LostRankError", "RankStatus", "Watchdog", "watched"]
