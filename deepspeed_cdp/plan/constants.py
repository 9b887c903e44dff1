"""Numbers that plans, programs and the runtime agree on."""

PERSISTENT = -1  # the index of the unit of persistent parameters
END, START = 0, 1  # phases: at equal logical time, the end of a pass comes before the start of the next
RELEASES = 3  # per visit; StreamLayout.credits numbers them
ACROSS_BYTES = 16  # loss sum and count: the owners of several rings add them up with the gradient sums
