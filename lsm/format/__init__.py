"""The bytes on storage.

Rules of this package:

- What is written and how it is read back, and nothing else: no requests, no policy, no state.
- Every decoder treats its input as hostile: it answers what was written or raises `CorruptionError` /
  `FormatVersionError`, within memory bounded by the size of the input and the sizes that it records.
- `docs/format.md` specifies these bytes, golden files in the tests hold the code to it. A change of bytes is a
  new format version.
"""

FORMAT_VERSION = 1
