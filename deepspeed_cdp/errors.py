"""Errors for users and operators."""

WHY_MISSING = "a rank crashed, exited or is late, or evaluates, saves, loads or flushes where others do not"

SET_ANY_ORDER = 'set "cyclic": {"any_order": true}, with which parameters stay for the whole step'


class HandoffError(RuntimeError):
    """A message did not arrive, or was not taken: the peer failed, is too slow, or is out of step.

    The message names this rank, the step, the stage, the stream and the peer. The engine cannot go on: restart from the last
    checkpoint.
    """


class DivergenceError(RuntimeError):
    """Ranks that must be equal are not: optimizer options of ranks, or masters of rings. All ranks raise it.

    The message names two ranks, the step, and both values. The engine cannot go on: restart from a checkpoint before that step.
    """


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read. The message names the file; nothing was changed, and training may go on."""


def class_and_text(error: BaseException) -> str:
    """For one line, without the C++ stack that torch appends."""
    return f"{type(error).__name__}: {error}".split("\n", 1)[0].rstrip(": ")
