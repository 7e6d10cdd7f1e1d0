"""Counts words: map, shuffle, reduce."""

import collections

import ray

TEXTS = ["the cat and the dog", "a dog and a bird", "the bird sings"]


@ray.remote(num_returns=2)
def count(text):
    counts = collections.Counter(text.split())
    return [{word: n for word, n in counts.items() if (len(word) % 2 == part)} for part in range(2)]


@ray.remote
def merge(*parts):
    return dict(sorted(sum(map(collections.Counter, parts), collections.Counter()).items()))


ray.init()
parts = [count.remote(text) for text in TEXTS]
print(ray.get([merge.remote(*[each[index] for each in parts]) for index in range(2)]))
