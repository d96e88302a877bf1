"""A simulator of the engine: time, scheduling, storage and failures from a seed.

Rules of this package:

- One seed, one run, byte for byte: all chance comes from `random.Random`s that are made from the seed, all time from
  the world's clock, and nothing depends on the order of sets or on addresses.
- The engine under test is the real one, through its public methods; what is simulated is the ground it stands on.
- The parts know little of each other: `store` (what storage does), `faults` (what goes wrong, and how often), `world`
  (who runs when), `ledger` (what was asked for and answered), `oracle` (what may be seen), `scenario` and `actors`
  (what is done), `audit` (the checks while nothing moves), `run` (a whole run), `shrink`, `story`.
"""
