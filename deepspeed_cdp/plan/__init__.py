"""Who does what, when, into which bytes: schedules, partitions, plans and each rank's program, as data.

Pure functions and frozen dataclasses; nothing here imports torch. Read ``schedule``, then ``unit_schedule`` and ``plan``, then
``actions`` and ``builder``. Imports nothing of the package.
"""
