"""Starting a command: in this process, as ranks or shards of this machine, as a Slurm job, or on a list of hosts.

The configuration is composed and the run folder chosen once, by the process that the user started. It writes both
into a job file under ``RUN/logs``, and every process that it starts reads that file and composes nothing.
``command.py`` decides, ``ranks.py`` starts ranks through torch's elastic launcher, ``shards.py`` processes that only
share a folder, ``slurm.py`` and ``hosts.py`` do the same on other machines, ``member.py`` is what such a process runs,
``outcome.py`` is how it says how it ended.
"""

from dflash2_train.launching.checks import prepare_folder
from dflash2_train.launching.command import Command, run_launched
from dflash2_train.launching.environment import without_ranks

__all__ = ["Command", "prepare_folder", "run_launched", "without_ranks"]
