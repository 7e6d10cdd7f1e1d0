"""Detects Ray like a library that uses it optionally, and imports names that do not exist."""

import importlib
import importlib.util

import ray
import ray.util

print(importlib.util.find_spec("ray") is not None, ray.__name__, ray.__version__.startswith("2."))
for name in ("ray.tune", "ray.data", "ray.util.collective"):
    try:
        importlib.import_module(name)
    except ImportError as error:
        print(name, "there are: ray" in str(error))
try:
    print(ray.serve)
except AttributeError as error:
    print("ray has here" in str(error))
print(ray.util.placement_group is not importlib.import_module("ray.util.placement_group"))
with ray.init() as context:
    print(context.dashboard_url, ray.get(ray.remote(lambda: "ran").remote()))
print(ray.is_initialized())
