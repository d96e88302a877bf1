"""Reading and checking all that is stored.

Rules of this package:

- It reads what readers read, with the code that they read with, through a cache of its own that begins empty: nothing
  counts as read that was not.
- It changes nothing. Only a repair does, and that drops a torn tail, which the next write would drop, too.
- A problem is a text that names the object. One problem does not hide the others, except that records are checked only
  where the indexes of all segments can be read.
- Memory is bounded: by a page of an index and a batch of values; beside that, of the checkpoints of one namespace the
  ids, parents and names of stored channels are held.
- `store` goes through the threads, `thread` through the parts of one: each part is checked by a module of its own.
"""

from lsm.verify.report import Report, StoreReport
from lsm.verify.store import verify_store
from lsm.verify.thread import verify_thread

__all__ = ["Report", "StoreReport", "verify_store", "verify_thread"]
