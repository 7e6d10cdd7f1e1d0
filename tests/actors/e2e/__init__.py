"""End-to-end tests of actors. This is a package, so that fixtures of package scope end with it."""
