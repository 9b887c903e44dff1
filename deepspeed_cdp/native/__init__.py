"""The message loops of the executor in C++ (``*.h``, ``module.cpp``), for transport "peer", and their build (``load.py``).

transport/peer.py, runtime/messages.py and runtime/executor.py say what these loops do; without a compiler those files run.
"""
