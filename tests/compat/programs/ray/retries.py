"""Tasks that are retried and actors that are restarted."""

import os
import sys
import tempfile

import ray

scratch = tempfile.TemporaryDirectory()
folder = scratch.name


def times(name):
    path = os.path.join(folder, name)
    with open(path, "a") as file:
        file.write(".")
    return os.path.getsize(path)


@ray.remote(max_retries=2)
def crashes():
    if times("crashes") < 3:
        os._exit(1)
    return "after crashes"


@ray.remote(max_retries=5, retry_exceptions=[KeyError])
def raises():
    if times("raises") < 3:
        raise KeyError("again")
    return "after errors"


@ray.remote(max_restarts=1, max_task_retries=-1)
class Actor:
    def crash_once(self):
        if times("actor") < 2:
            sys.exit(1)
        return ray.get_runtime_context().was_current_actor_reconstructed


@ray.remote(max_retries=0)
def dies():
    os._exit(1)


ray.init()
print(ray.get([crashes.remote(), raises.remote()]))
print(ray.get(Actor.remote().crash_once.remote()))
try:
    ray.get(dies.remote())
except ray.exceptions.WorkerCrashedError:
    print("crashed")
scratch.cleanup()
