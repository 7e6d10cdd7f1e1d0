"""Tests of the optimizer. A package, so that its fixtures of that scope end with it."""
