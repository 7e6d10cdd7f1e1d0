"""Takes results as they come, and keeps a number of calls under way."""

import ray


@ray.remote
def work(number):
    return number * number


ray.init(num_cpus=2)
numbers = iter(range(20))
pending = [work.remote(next(numbers)) for _ in range(4)]
total = 0
while pending:
    done, pending = ray.wait(pending, num_returns=1, timeout=60)
    total += sum(ray.get(done))
    for number in numbers:
        pending.append(work.remote(number))
        break
print(total)
print(ray.wait([work.remote(1)], num_returns=1)[1])
