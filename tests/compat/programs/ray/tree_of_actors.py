"""A supervisor actor that makes workers and hands its own handle to them."""

import ray


@ray.remote
class Worker:
    def __init__(self, parent, number):
        self.parent = parent
        self.number = number

    def work(self):
        return ray.get(self.parent.offset.remote()) + self.number


@ray.remote(max_concurrency=4)
class Supervisor:
    def start(self, count):
        itself = ray.get_runtime_context().current_actor
        self.workers = [Worker.remote(itself, number) for number in range(count)]

    def offset(self):
        return 10

    def results(self):
        return ray.get([worker.work.remote() for worker in self.workers])


ray.init()
supervisor = Supervisor.remote()
ray.get(supervisor.start.remote(3))
print(ray.get(supervisor.results.remote()))
