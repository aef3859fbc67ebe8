"""Types of the public API, which `__init__.py` imports on use."""

from maxlm.api.ahead import Plan as Plan, StepReport as StepReport, compile_step as compile_step, plan as plan
from maxlm.api.configs import load_config as load_config
from maxlm.api.data import Data as Data, load_tokenizer as load_tokenizer, pack_texts as pack_texts
from maxlm.api.fit import FitResult as FitResult, fit as fit
from maxlm.api.model import Model as Model
from maxlm.api.program import Program as Program, build as build
from maxlm.api.runs import Run as Run
from maxlm.api.table import Table as Table
from maxlm.base.errors import UserError as UserError
from maxlm.config.schema import Config as Config
from maxlm.config.table import register as register
from maxlm.data.batch import Batch as Batch
from maxlm.telemetry.observer import Event as Event, Observer as Observer, StepRecord as StepRecord
from maxlm.training.step import Metrics as Metrics, TrainState as TrainState

__version__: str
