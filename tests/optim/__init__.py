"""Tests of the optimizer. This is a package, so that fixtures of package scope end with it."""
