"""How messages travel: one contract (``base``), several transports, and the choice between them (``choose``).

A transport moves bytes between ranks and knows nothing of stages or versions. Imports ``errors`` only.
"""
