"""The decision log: what routers decided and by which terms, and what is made of it (docs/decisions.md).

What lives here: the records of the topic `router-decisions` (`records`, `families`), reading them (`reading`), one
decision in words (`words`), and a recorded time as a trace (`trace`). What must not: recording, which is the router's
(streams.router_api.deciding.decision_recorder), and simulation (streams.lab.simulation.recorded).
"""
