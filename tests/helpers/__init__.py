"""What tests share: a reference implementation, an engine double, an API client."""
