"""Random small programs over the public API, each compared with a sequential model of its allowed outcomes.

    python -m tests.programs --seeds 0-4999                     # on the embedded cluster
    python -m tests.programs --seeds 0-499 --mode cuts          # over TCP connections that a proxy cuts at random
    python -m tests.programs --seeds 17 --mode tcp --source     # print the program of a seed, do not run it

* ``program``: the statements that a program is made of, and their Python source.
* ``generator``: a seed gives a program.
* ``library``: what the source of a program imports: actors, tasks, and functions that observe outcomes.
* ``model``: which outcomes a program allows; compares them with what was observed.
* ``session``: a cluster or a group on which programs run one after the other, and what they must not leave behind.
* ``shrinker``: removes statements from a program that fails, as long as it still fails.
"""
