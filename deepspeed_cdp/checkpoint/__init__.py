"""Saving and loading: this package's files, DeepSpeed's formats, exports. Files are written atomically and checked before use.

Imports ``plan``, ``optim``, ``runtime`` and ``pipeline``.
"""
