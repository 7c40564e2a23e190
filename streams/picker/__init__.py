"""The endpoint picker: a router that gateways ask over Envoy's ext_proc protocol.

What lives here: the protocol, the picks, and the gRPC server (grpc). What must not: decisions, bookings and queues
(router_api), and reading and rendering prompts (prompts).
"""
