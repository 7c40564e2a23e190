"""`kvstreams doctor`: what is wrong with a fleet, in words, and how to fix it (docs/doctor.md).

What lives here: reading a scope's topics, its routers and its engines (`kafka_reading`, `router_reading`,
`engine_reading`, `probe`), and the checks of what was read (`checks/`). What must not: writing anything, except for the
prompt of `--probe`.

A reader returns an observation (`observations`), which is a value. A check is a pure function from observations to
findings. So each check is tested without a fleet, and nothing is judged while it is read.
"""
