"""How long did the steps of a run take?  Read from the log of the framework that ran them."""

from autoplan.read.logs.reader import Batch, LoggedRun, LogReader

__all__ = ["Batch", "LogReader", "LoggedRun"]
