"""The processes of routers: the server of `kvstreams router`, several processes on one port, and their end.

What lives here: starting and stopping. What must not: whatever happens while requests are served.
"""
