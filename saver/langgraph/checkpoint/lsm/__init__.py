"""LangGraph checkpoints in a directory or a bucket."""

from langgraph.checkpoint.lsm.saver import LSMSaver
from lsm.retention import Retention

__all__ = ["LSMSaver", "Retention"]
