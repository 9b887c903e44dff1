"""Now deepspeed_cdp.analysis.learning_simulator."""

from deepspeed_cdp.analysis.learning_simulator import Simulator, stages_of

__all__ = ["Simulator", "stages_of"]
