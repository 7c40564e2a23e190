"""One routing decision: eligibility, cost, policies, selection."""
