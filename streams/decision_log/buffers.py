"""Where a batch of noted decisions has what, in one array of integers and one of numbers (pure).

What lives here: positions, which the kernel and NumPy share. What must not: names of terms, and objects (batches).

The integers begin with HEAD words about the batch; then come a row for each decision, the listed candidates of all of
them, and their families. The numbers are the candidates' costs, and then their terms as float32, two in the place of a
number: what they take of the processor's caches costs more than making them short.
"""

from __future__ import annotations

#: How many there are so far: decisions, candidates, terms, families.
N_DECISIONS, N_LISTED, N_TERMS, N_FAMILIES = 0, 1, 2, 3

#: Where the candidates and the families begin in the integers, and the terms in the numbers.
LISTED_AT, FAMILIES_AT, TERMS_AT = 4, 5, 6

#: Cheapest candidates that are listed in addition to the chosen one.
N_BEST = 7

#: What the next decisions have in common: given terms; 1 if there are one more and the costs, 0 if not; all terms of a
#: candidate; the number of the kind; tokens per block.
N_GIVEN, HAS_ONE_MORE, N_COLUMNS, KIND, BLOCK_SIZE = 8, 9, 10, 11, 12

HEAD = 13

#: Words of a decision's row, in the order of the fields of batches.DECISION.
ROW = 11
