"""What there is, and what is free of it."""

import ray


@ray.remote(num_cpus=1, resources={"special": 1})
class Holder:
    def ready(self):
        return ray.get_runtime_context().get_assigned_resources()


@ray.remote(num_cpus=0.5, resources={"special": 1}, memory=1000, max_calls=1)
def task():
    return "ran"


context = ray.init(num_cpus=4, resources={"special": 2}, include_dashboard=False, object_store_memory=10**8)
holder = Holder.remote()
print(dict(sorted(ray.get(holder.ready.remote()).items())))
total, free = ray.cluster_resources(), ray.available_resources()
print(total["CPU"], total["special"], free["CPU"], free["special"])
print(ray.get(task.remote()), [node["Alive"] for node in ray.nodes()])
print(ray.nodes()[0]["NodeID"] == context.address_info["node_id"], ray.is_initialized())
ray.shutdown()
print(ray.is_initialized())
