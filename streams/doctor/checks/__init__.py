"""The checks of the doctor: pure functions from what was read to what is wrong, one module per group.

What lives here: the checks, and the table of them. What must not: reading anything (the readers above).
"""
