"""Numbers that plans, programs and the runtime agree on."""

PERSISTENT = -1  # the index of the unit of persistent parameters
END, START = 0, 1  # phases: at equal logical time, the end of a pass comes before the start of the next
OPTIONS = 8  # of a rank's optimizer, compared each step: its first numbers and a digest of all (optim/options.py)
DIFFERENCE = 7  # of two ranks, told to all: pass, step, both ranks, which number, both values (runtime/divergence.py)
CHECKSUM = 2  # of an owner's masters: the halves of a sum in 64 bits
