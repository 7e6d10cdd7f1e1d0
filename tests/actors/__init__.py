"""End-to-end and unit tests of actors."""
