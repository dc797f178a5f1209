"""``dflash2-train --multirun``: a grid of runs of one experiment over one data cache.

``grid`` reads the command line and composes every job, ``jobs`` runs one as a process of its own, ``run`` goes through
them in order. What came out is read by ``dflash2_train.runs.sweep``, also while the sweep is under way.
"""
