"""The owner's side: fp32 masters, updates by the user's optimizer, offloading, loss scaling.

Imports ``plan``, ``model`` and ``transport``.
"""
