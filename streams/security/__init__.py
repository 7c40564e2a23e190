"""Who may do what: tokens and TLS of the HTTP API, and how clients of Kafka authenticate (docs/security.md).

What lives here: tokens and their rights, certificates, the check of HTTP requests, and the security part of every
Kafka client's configuration. What must not: which call needs which right (router_api.http.calls).
"""
