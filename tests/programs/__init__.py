"""Run random small programs that use the public API. A sequential model checks their outcomes.

    python -m tests.programs --seeds 0-4999                     # on the embedded cluster
    python -m tests.programs --seeds 0-499 --mode cuts          # over TCP connections that a proxy cuts at random
    python -m tests.programs --seeds 17 --mode tcp --source     # print the program of a seed, do not run it

* ``program``: the statements of programs, and their Python source.
* ``generator``: makes a program from a seed.
* ``library``: the source of each program imports it: actors, tasks, and functions that record outcomes.
* ``model``: computes which outcomes a program allows, and compares them with the recorded outcomes.
* ``session``: runs programs one after the other on a cluster or a group, and checks that they leave nothing behind.
"""
