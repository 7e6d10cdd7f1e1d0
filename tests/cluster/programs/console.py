"""The driver of a cluster, which evaluates each line of its standard input and prints the result as JSON.

console.py ADDRESS [NAME=VALUE ...]      # settings of init()
"""

import json
import sys

import actorrpc

_given = (each.partition("=") for each in sys.argv[2:])
with actorrpc.init(listen=sys.argv[1], **{name: json.loads(value) for name, _, value in _given}):
    print("listening", flush=True)
    for line in sys.stdin:
        print("found", json.dumps(eval(line)), flush=True)
