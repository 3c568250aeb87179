"""Which core a request goes to."""

from tercet_frontend.routing.columns import CoreFacts, LoadReport
from tercet_frontend.routing.policy import Choice, RoutingPolicy, policy_names, routing_policy
from tercet_frontend.routing.router import Member, Placement, Router

__all__ = [
    "Choice",
    "CoreFacts",
    "LoadReport",
    "Member",
    "Placement",
    "Router",
    "RoutingPolicy",
    "policy_names",
    "routing_policy",
]
