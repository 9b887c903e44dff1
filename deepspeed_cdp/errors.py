"""Errors that a user or an operator reads."""


class HandoffError(RuntimeError):
    """A hand-off did not happen: a peer is gone, too slow, or out of step.

    The message names this rank, the step, the stage, the stream and the peer.
    """
