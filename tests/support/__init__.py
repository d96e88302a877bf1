"""What the tests share: servers, proxies and drivers that are started for real and stopped for sure.

Rules of this package:

- Nothing here imports the saver or the engine; a test says what it tests.
- Whatever starts a process or a thread is a context manager, and ends it on the way out. A process ends by
  itself, too, when its parent dies.
"""
