"""Each rank's work as data: schedules, partitions, plans and programs.

All of it are pure functions and frozen dataclasses, computed alike on every rank. Nothing here imports torch or another folder of
the package. Read ``schedule``, then ``unit_schedule`` and ``plan``, then ``actions`` and ``builder``.
"""
