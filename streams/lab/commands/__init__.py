"""The laboratory's commands: simulated engines and fleets, comparisons, a local Kafka, and the demo.

What lives here: one module per group of commands; the command line adds its `COMMANDS` to its own. What must not: what
a command runs. Importing this package must stay cheap: a command imports what it runs inside its body.
"""
