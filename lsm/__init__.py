"""A manifest-indexed, log-structured store of threads of checkpoints.

Rules of this package:

- The engine knows threads, records, segments, manifests and conditional writes. Values are opaque bytes. It knows
  nothing of LangGraph; `langgraph.checkpoint.lsm` does.
- Logic is steps (`lsm.steps`), run by a driver (`lsm.drive`). `lsm.engine` is where they begin.
"""
