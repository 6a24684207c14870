"""The right answers: the same scripts run live through mlx-lm's generate_step and BatchGenerator."""

from dataclasses import dataclass

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, generate_step


@dataclass
class Emission:
    request: int
    token: int
    logprobs: bytes  # [vocab], in the model's own type


@dataclass
class Run:
    emissions: list
    forwards: list  # (rows, tokens a row, cache columns before) of every forward, in order


class Logged:
    """A model that notes the shape of every forward."""

    def __init__(self, model):
        self.model, self.forwards = model, []

    def __getattr__(self, name):
        return getattr(self.model, name)

    def __call__(self, inputs, cache=None):
        self.forwards.append((*inputs.shape, cache[0].size()))
        return self.model(inputs, cache=cache)


def raw(array: mx.array) -> bytes:
    return bytes(memoryview(mx.contiguous(array.view(mx.uint8))))


def run_serial(model, case):
    emissions = []
    for index, request in enumerate(case["requests"]):
        steps = generate_step(mx.array(request["prompt"]), model, max_tokens=request["max_tokens"],
                              prefill_step_size=case["prefill_step"])
        for token, logprobs in steps:
            emissions.append(Emission(index, int(token), raw(logprobs)))
    return emissions


def run_batch(model, case):
    generator = BatchGenerator(model, completion_batch_size=case["completion_batch"],
                               prefill_batch_size=case["prefill_batch"], prefill_step_size=case["prefill_step"],
                               stop_tokens=[[token] for token in case["end_ids"]])
    requests = case["requests"]
    emissions, uids, live = [], {}, set()
    waiting = set(range(len(requests)))
    tick = 0
    while waiting or live:
        for index in sorted(waiting):
            if requests[index]["arrive"] <= tick:
                waiting.remove(index)
                (uid,) = generator.insert([requests[index]["prompt"]], [requests[index]["max_tokens"]])
                uids[uid] = index
                live.add(uid)
        for uid in sorted(live):
            cancel = requests[uids[uid]]["cancel"]
            if cancel is not None and cancel <= tick:
                generator.remove([uid])
                live.remove(uid)
        _, responses = generator.next()
        for response in responses:
            emissions.append(Emission(uids[response.uid], response.token, raw(response.logprobs)))
            if response.finish_reason is not None:
                live.remove(response.uid)
        tick += 1
    generator.close()
    return emissions


def run(model, case):
    logged = Logged(model)
    emissions = run_serial(logged, case) if case["mode"] == "serial" else run_batch(logged, case)
    return Run(emissions, logged.forwards)
