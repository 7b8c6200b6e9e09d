"""Functions that are recorded as a whole: a pure function of known values is looked up as one operation is.

An operation that was recorded before is found in its table by its arguments.  The same holds for a Python function, if
what it gives depends on nothing but its arguments and what it reads, and if it changes nothing: the values that it gave
the first time are then what it gives.  So a function that records many operations is looked at (:mod:`watch`), its
source is evaluated once by rules that admit nothing else (:mod:`evaluate`, :mod:`allowed`), everything it reads from
outside is written down (:mod:`reads`), and from then on a call with the same values is one lookup (:mod:`whole`).
"""
