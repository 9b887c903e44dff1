"""C++ and its build (``load.py``).

- ``*.h``, ``module.cpp``: the message loops of the executor, for transport "peer". transport/peer.py, runtime/messages.py and
  runtime/executor.py say what these loops do.
- ``autograd.cpp``: what runtime/param_hooks.py and runtime/grad_accumulation.py do most often.

Without a compiler those files of Python run.
"""
