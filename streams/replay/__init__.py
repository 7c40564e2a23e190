"""`kvstreams replay`: what a router knew, rebuilt from the topics of a scope.

What lives here: where a replay ends in each topic, running it, and what is said about the result. What must not:
reading topics and folding records, which are the router's (router_api.knowledge, router_api.sharing).
"""
