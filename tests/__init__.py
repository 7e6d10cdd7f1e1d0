"""The tests of actorrpc. A package, so that the processes that tests start can import test modules."""
