"""The product with real engines, on a machine without a GPU: `make real`."""
