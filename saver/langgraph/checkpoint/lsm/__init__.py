"""LangGraph checkpoints in a directory or a bucket."""

from langgraph.checkpoint.lsm.saver import LSMSaver

__all__ = ["LSMSaver"]
