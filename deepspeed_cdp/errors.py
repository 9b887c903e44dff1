"""Errors that a user or an operator reads."""

# why ranks do not meet
APART = "a rank crashed, exited or is late, or evaluates, saves, loads or flushes where others do not"


class HandoffError(RuntimeError):
    """A hand-off did not happen: a peer is gone, too slow, or out of step.

    The message names this rank, the step, the stage, the stream and the peer.
    """


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read; the message names the file. Nothing was changed."""
