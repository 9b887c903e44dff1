"""Point-to-point messages between ranks: one contract (``base``) and its transports.

A transport moves bytes between ranks and knows nothing of stages or versions. ``choose`` decides which transport a machine
allows, and ``connect`` makes it. Imports ``errors`` and ``version`` only.
"""
