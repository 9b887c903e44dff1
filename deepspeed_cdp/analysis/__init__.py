"""The paper's results: the oracle, the learning simulator, activation memory, the cost table, and predicted step times.

It imports ``plan``, ``model`` and ``optim``. No part of training imports it.
"""
