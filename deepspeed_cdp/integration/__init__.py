"""Where DeepSpeed is: registration, config, engines, ZeRO-3's functions on parameters.

The only folder that names DeepSpeed's private attributes. Imports everything but ``analysis`` and ``cli``.
"""
