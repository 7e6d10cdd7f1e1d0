"""PyTorch's own RPC tests, as the torch wheel ships them, run on actorrpc.

    python -m tests.conformance [--category public-api] [--test NAME] [--jobs 2] [--fast] [--spawn]

``table.tsv`` says which outcome each test is expected to have, and why where that is not "passed". The tests are never
copied: they are taken from the installed torch.
"""
