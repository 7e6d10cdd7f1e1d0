"""Stages that pass references on, with at most two items in flight."""

import ray


@ray.remote
class Stage:
    def __init__(self, name):
        self.name = name

    def run(self, item):
        return [*item, self.name]


ray.init()
stages = [Stage.remote(name) for name in "abc"]
under_way, results = [], []
for number in range(6):
    ref = ray.put([number])
    for stage in stages:
        ref = stage.run.remote(ref)
    under_way.append(ref)
    if len(under_way) == 2:
        results.append(ray.get(under_way.pop(0)))
results += ray.get(under_way)
print(results == [[number, "a", "b", "c"] for number in range(6)])
