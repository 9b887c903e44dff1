"""Import paths that documents gave users before the folders existed; each module hands on names from where they are now."""
