"""Programs of this checkout that are not part of the installed package."""
