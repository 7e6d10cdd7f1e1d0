"""A detached actor that tasks find by its name."""

import ray


@ray.remote
class Registry:
    def __init__(self):
        self.entries = {}

    def add(self, name, value):
        self.entries[name] = value

    def all(self):
        return dict(sorted(self.entries.items()))


@ray.remote
def register(number):
    registry = ray.get_actor("registry", namespace="program")
    ray.get(registry.add.remote(f"task {number}", number))


ray.init(namespace="program")
Registry.options(name="registry", lifetime="detached").remote()
ray.get([register.remote(number) for number in range(3)])
print(ray.get(ray.get_actor("registry").all.remote()))
same = Registry.options(name="registry", get_if_exists=True).remote()
print(len(ray.get(same.all.remote())))
try:
    Registry.options(name="registry").remote()
except ValueError:
    print("taken")
ray.kill(same)
try:
    ray.get_actor("registry")
except ValueError:
    print("gone")
