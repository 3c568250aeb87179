"""Which core runs a request: policies behind one interface."""

from tercet_frontend.routing.policy import Candidate, RoutingPolicy, policy_names, routing_policy

__all__ = ["Candidate", "RoutingPolicy", "policy_names", "routing_policy"]
