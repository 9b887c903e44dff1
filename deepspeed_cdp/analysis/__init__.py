"""The paper's results: the oracle, the learning simulator, activation memory, the cost table, predicted step times.

Imports ``plan`` and ``model``; no part of training imports it.
"""
