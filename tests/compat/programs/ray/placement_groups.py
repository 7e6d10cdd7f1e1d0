"""Actors in a placement group, which ends with it."""

import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy


@ray.remote(num_cpus=1)
class Trainer:
    def rank(self, rank):
        return rank


ray.init(num_cpus=4)
group = placement_group([{"CPU": 1}] * 3, strategy="PACK")
ray.get(group.ready())
trainers = [
    Trainer.options(
        scheduling_strategy=PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=index
        )
    ).remote()
    for index in range(3)
]
print(ray.get([trainer.rank.remote(index) for index, trainer in enumerate(trainers)]))
print(placement_group_table(group)["state"], group.bundle_specs)
remove_placement_group(group)
try:
    ray.get(trainers[0].rank.remote(0))
except ray.exceptions.RayActorError:
    print("removed")
print(placement_group([{"CPU": 64}]).wait(timeout_seconds=0.1))
