"""PyTorch's own RPC tests, as the torch wheel ships them, run on actorrpc.

    python -m tests.conformance [--category public-api] [--test NAME] [--jobs 2] [--fast] [--spawn]

``table.tsv`` contains the expected outcome of each test, and the reason if it is not "passed". The tests are not copied, but
imported from the installed torch.
"""
