"""Cyclic pipelines, pyramids and single devices: one rank's instructions, weights and activations.

Imports ``plan``, ``model``, ``transport`` and ``optim``; knows nothing of DeepSpeed's engine.
"""
