"""The training step and the loop around it."""

from maxlm.training.loop import Outcome, train
from maxlm.training.program import Program, build_program
from maxlm.training.state import TrainState

__all__ = ["Outcome", "Program", "TrainState", "build_program", "train"]
