"""Proofs that a plan works: its form, and a dry-run of all ranks that finds hangs, mixed versions and overwritten buffers.

Pure, no torch; shares no code with the runtime. Imports ``plan`` only.
"""
