"""The paper's results: the oracle, the learning simulator, activation memory, the cost table, and predicted step times.

It imports ``plan`` and ``model``. No part of training imports it.
"""
