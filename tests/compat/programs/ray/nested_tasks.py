"""Tasks that start tasks, deeper than there are processors."""

import ray


@ray.remote
def fib(n):
    if n < 2:
        return n
    return sum(ray.get([fib.remote(n - 1), fib.remote(n - 2)]))


@ray.remote
def quicksort(values):
    if len(values) < 2:
        return values
    pivot, *rest = values
    left = quicksort.remote([each for each in rest if each < pivot])
    right = quicksort.remote([each for each in rest if each >= pivot])
    return [*ray.get(left), pivot, *ray.get(right)]


@ray.remote
def refs(count):
    return [ray.put(number) for number in range(count)]


ray.init(num_cpus=2)
print(ray.get(fib.remote(6)))
print(ray.get(quicksort.remote([3, 1, 4, 1, 5, 9, 2, 6])))
print(ray.get(ray.get(refs.remote(3))))
