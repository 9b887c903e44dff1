"""The model: finding its units, their flat layouts, its plan, and models whose parameters are partitioned or on the meta device.

It imports ``plan``.
"""
