"""Numbers that plans, programs and the runtime agree on. Pure, no torch."""

PERSISTENT = -1  # the index of the persistent unit, where a unit is named
END, START = 0, 1  # at equal logical time, ends come before starts
RELEASES = 3  # per visit: see StreamLayout.lets
ACROSS_BYTES = 16  # loss sum and count, which the owners of several rings add up beside the sums
