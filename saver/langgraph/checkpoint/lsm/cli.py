"""The command `langgraph-lsm`, where it begins.

Rules of this module:

- It imports nothing but the standard library, so that it can say what to install; the commands are in `commands`.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec


def main() -> None:
    """Run the command line. Ends the process: 0 if all went well, 1 if something failed, 2 if it was called wrongly."""
    missing = [name for name in ("typer", "rich") if find_spec(name) is None]
    if missing:
        sys.stderr.write(
            f"langgraph-lsm needs {' and '.join(missing)}, which the extra [cli] brings: "
            "pip install 'langgraph-checkpoint-lsm[cli]'\n"
        )
        sys.exit(2)
    from langgraph.checkpoint.lsm.commands import app

    app(prog_name="langgraph-lsm")


if __name__ == "__main__":
    main()
