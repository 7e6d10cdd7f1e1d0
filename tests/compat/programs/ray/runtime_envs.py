"""Environment variables for the whole program, and for one task."""

import os

import ray


@ray.remote
def variable(name):
    return os.environ.get(name)


@ray.remote
class Reader:
    def read(self, name):
        return os.environ.get(name)


ray.init(runtime_env={"env_vars": {"EVERYWHERE": "yes"}})
print(ray.get([variable.remote("EVERYWHERE"), variable.remote("HERE")]))
here = {"env_vars": {"HERE": "only"}}
print(ray.get([variable.options(runtime_env=here).remote(name) for name in ("EVERYWHERE", "HERE")]))
print(ray.get(Reader.options(runtime_env=here).remote().read.remote("HERE")))
try:
    variable.options(runtime_env={"pip": ["requests"]})
except ValueError as error:
    print("install the packages" in str(error))
