"""Helpers that several tests share: models, worker processes, launchers, oracles.

Test files import from here and never from each other.
"""
