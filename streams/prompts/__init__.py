"""From a client's request to a prompt that a router can match. Fronts and pickers use it."""
