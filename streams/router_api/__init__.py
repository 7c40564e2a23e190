"""The router: a read replica of the agents' tables plus the fold of router-loads, behind HTTP (docs/http.md).

    processes/        starting and ending router processes
    http/             answering HTTP: calls, bodies, limits, pages, metrics
    deciding/         from a parsed request to a rank and its booking; requests that wait
    sharing/          bookings and changes of the registry, shared with other routers through Kafka
    knowledge/        what is read of the topics: fleet, index, predictions, trust
    messages/         requests and answers, as JSON and as values

A folder imports only folders below it. A contract in pyproject.toml checks that.
"""
