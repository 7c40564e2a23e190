"""A gRPC server for one event loop: HTTP/2 by h2, no task per stream, a limit on all that a peer sends.

What lives here: connections, calls, flow control, limits and the health service. What must not: the messages of any
other service, and anything of a router. A service is a function that gets a Call and returns a Stream (call).

Outermost first: server, connection, call, then what is pure: frames (what a peer may send), framing (messages in a
stream of bytes), words (statuses, headers and deadlines as text), limits.
"""
