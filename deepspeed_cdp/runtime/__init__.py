"""One rank at work: executes its program, moves parameters in and out of the module, sums gradients.

Imports ``plan``, ``model``, ``transport``, ``optim`` and ``native``; knows nothing of DeepSpeed's engine.
"""
