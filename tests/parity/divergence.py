"""How far the stock rung's batch is from the same rows run alone, by family: a number to look at, never a gate.

MLX picks its kernels by shape, so B=N and B=1 differ in their last bits (DESIGN section 4.1). This tells by how much.
"""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

CASE = "B=8"  # what the names of the cases that are watched begin with


@dataclass
class Drift:
    family: str
    model: str
    tokens: int  # steps compared
    mean: float  # of the KL divergence, in nats
    most: float
    same: int  # steps at which both picked the same token

    def cells(self):
        return [self.family, self.model, self.tokens, f"{self.mean:.1e}", f"{self.most:.1e}", f"{self.same} of {self.tokens}"]

    def line(self):
        return (f"{self.family} | {self.model} | KL of stock {CASE} against B=1 (no gate): mean {self.mean:.1e}, "
                f"most {self.most:.1e}")


def watched(variants):
    """One model a family: in float32, whose last bits show the most on a CPU, where it has one."""
    plain = [variant for variant in variants if variant.kv_quant == "off"]
    return {variant.family: variant for variant in reversed(sorted(plain, key=lambda v: v.dtype != mx.float32))}.values()


def case_of(script):
    return next(index for index, case in enumerate(script) if case["name"].startswith(CASE))


def alone(case):
    """The same requests on the serial lane, one after another."""
    return dict(name=f"{case['name']}, one by one", mode="serial", prefill_step=case["prefill_step"],
                requests=case["requests"])


def _logprobs(emission, dtype):
    """Normalized in double precision."""
    if dtype == mx.bfloat16:
        values = (np.frombuffer(emission.logprobs, np.uint16).astype(np.uint32) << 16).view(np.float32)
    else:
        values = np.frombuffer(emission.logprobs, np.float32 if dtype == mx.float32 else np.float16)
    values = values.astype(np.float64)
    return values - np.log(np.exp(values).sum())


def measure(variant, one_by_one, together):
    """`together` against `one_by_one`, as long as a row has said the same so far."""
    divergences, same = [], 0
    for request in sorted({emission.request for emission in one_by_one.emissions}):
        solo = [e for e in one_by_one.emissions if e.request == request]
        shared = [e for e in together.emissions if e.request == request]
        for a, b in zip(solo, shared):
            p, q = _logprobs(a, variant.dtype), _logprobs(b, variant.dtype)
            divergences.append(float((np.exp(p) * (p - q)).sum()))
            same += a.token == b.token
            if a.token != b.token:
                break
    return Drift(variant.family, variant.name, len(divergences), float(np.mean(divergences)), max(divergences), same)


def markdown(drifts):
    lines = [
        f"An internal check and no gate: the KL divergence (nats) of the stock rung at {CASE} from the same rows at B=1, as "
        "long as a row has said the same in both. mlx-lm's batches differ from its own B=1 just so; how much depends on "
        "the processor that MLX runs on.",
        "",
        "| family | model | tokens | mean KL | largest KL | same pick |",
        "|---|---|---|---|---|---|",
    ]
    return [*lines, *(f"| {' | '.join(map(str, drift.cells()))} |" for drift in drifts.values()), ""]
