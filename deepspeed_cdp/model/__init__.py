"""From a module to the plan's units: discovery, flat layouts of parameters, models whose values are elsewhere.

Imports ``plan``.
"""
