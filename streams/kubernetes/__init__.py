"""What bridges and pickers read from the API server of Kubernetes."""
