"""Checks of a plan: its form, and a dry-run of all ranks that finds deadlocks, wrong versions and overwritten buffers.

It imports ``plan`` only, no torch, and shares no code with the runtime.
"""
