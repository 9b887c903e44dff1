"""Saving, loading and converting checkpoints: this package's format, DeepSpeed's ZeRO-3 and universal formats, fp32 weights.

A checkpoint is written atomically and checked before it is loaded. Imports ``optim``, ``runtime`` and ``pipeline``; engines
(``integration``) pass themselves in, as the protocols of ``common``, ``save_load`` and ``pipeline`` say.
"""
