"""The right answers: the same scripts run live through mlx-lm's generate_step and BatchGenerator, with quantized KV as
mlx-optiq makes those two quantize it."""

import sys
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models.cache import LRUPromptCache, QuantizedKVCache, make_prompt_cache


@dataclass
class Emission:
    request: int
    token: int
    logprobs: bytes  # [vocab], in the model's own type


@dataclass
class Run:
    emissions: list
    forwards: list  # (rows, tokens a row, cache columns before) of every forward, in order
    cached: dict = field(default_factory=dict)  # tokens of its prompt that a request reused; only with a prompt cache


class Logged:
    """A model that notes the shape of every forward."""

    def __init__(self, model):
        self.model, self.forwards = model, []

    def __getattr__(self, name):
        return getattr(self.model, name)

    def __call__(self, inputs, cache=None):
        # mlx-lm's QuantizedKVCache knows no size(): it inherits one that is always 0.
        columns = cache[0].offset if isinstance(cache[0], QuantizedKVCache) else cache[0].size()
        self.forwards.append((*inputs.shape, columns))
        return self.model(inputs, cache=cache)


def raw(array: mx.array) -> bytes:
    return bytes(memoryview(mx.contiguous(array.view(mx.uint8))))


@contextmanager
def optiq(kv_quant, folder: Path, group):
    """Has mlx-optiq quantize KV as `optiq serve --no-fused-kv` does it, from the first token on: with --kv-bits 8 or 4,
    or with --kv-config and the model's own file. Yields what generate_step is to be told."""
    import mlx_lm.server as server
    from optiq.runtime.kv import rotating
    from optiq.runtime.kv.batch import BatchQuantizedKVCache
    from optiq.serve import _load_kv_config, install_mixed_kv, install_quantized_kv
    generate = sys.modules["mlx_lm.generate"]
    patched = [(generate, "maybe_quantize_kv_cache"), (server, "stream_generate"),
               (server.BatchGenerator, "insert_segments"), (BatchQuantizedKVCache, "merge"),
               (rotating, "_find_producer_cache")]
    before = [vars(owner)[name] for owner, name in patched]
    merge = BatchQuantizedKVCache.merge.__func__

    # In 0.7.7 a batch made of empty caches forgets their format and takes 8 bits in groups of 64, whatever was asked.
    def merge_in_their_format(cls, caches):
        merged = merge(cls, caches)
        merged.bits, merged.group_size = caches[0].bits, caches[0].group_size
        return merged

    BatchQuantizedKVCache.merge = classmethod(merge_in_their_format)
    # Layers that share KV look up its format by the id() of tuples, which may be another's by now: a cache of an earlier
    # run, say. Where nothing is found it is told from the tensors, exactly.
    rotating._find_producer_cache = lambda keys: None
    try:
        if kv_quant == "config":
            install_mixed_kv(_load_kv_config(folder / "kv_config.json"), quantized_kv_start=0)
            yield dict(kv_bits=8, quantized_kv_start=0)  # the bits are the file's
        else:
            install_quantized_kv(int(kv_quant), group, quantized_kv_start=0)
            yield dict(kv_bits=int(kv_quant), kv_group_size=group, quantized_kv_start=0)
    finally:
        for (owner, name), value in zip(patched, before):
            setattr(owner, name, value)
        del server.BatchGenerator._optiq_batch_kv_installed


class Texts:
    """Prompts, what was said to them, and the KV they leave behind, kept and found as mlx-lm's server does it."""

    def __init__(self, case):
        self.requests, self.texts, self.cached = case["requests"], {}, {}
        self.cache = LRUPromptCache() if case.get("reuse") else None

    def begin(self, index):
        """The prompt's tokens that are to be computed, and the KV of those before (or None)."""
        request = self.requests[index]
        prompt = self.texts.get(request.get("follows"), []) + request["prompt"]
        self.texts[index] = list(prompt)
        if self.cache is None:
            return prompt, None
        kv, rest = self.cache.fetch_nearest_cache("model", prompt)
        self.cached[index] = len(prompt) - len(rest)
        return rest, kv

    def leave(self, index, tokens, kv):
        if self.cache is not None:
            self.cache.insert_cache("model", list(tokens), kv)


def run_serial(model, case, kv):
    emissions, texts = [], Texts(case)
    for index, request in enumerate(case["requests"]):
        rest, cache = texts.begin(index)
        cache = make_prompt_cache(model.model) if cache is None else cache
        steps = generate_step(mx.array(rest), model, max_tokens=request["max_tokens"],
                              prefill_step_size=case["prefill_step"], prompt_cache=cache, **kv)
        for token, logprobs in steps:
            emissions.append(Emission(index, int(token), raw(logprobs)))
            texts.texts[index].append(int(token))
        texts.leave(index, texts.texts[index], cache)
    return emissions, texts.cached


def run_batch(model, case):
    generator = BatchGenerator(model, completion_batch_size=case["completion_batch"],
                               prefill_batch_size=case["prefill_batch"], prefill_step_size=case["prefill_step"],
                               stop_tokens=[[token] for token in case["end_ids"]])
    requests, texts = case["requests"], Texts(case)
    emissions, uids, live = [], {}, set()
    waiting = set(range(len(requests)))
    tick = 0
    while waiting or live:
        for index in sorted(waiting):
            if requests[index]["arrive"] <= tick:
                waiting.remove(index)
                rest, cache = texts.begin(index)
                computed = texts.texts[index][:len(texts.texts[index]) - len(rest)]
                (uid,) = generator.insert([rest], [requests[index]["max_tokens"]], caches=[cache],
                                          all_tokens=[computed])
                uids[uid] = index
                live.add(uid)
        for uid in sorted(live):
            cancel = requests[uids[uid]]["cancel"]
            if cancel is not None and cancel <= tick:
                generator.remove([uid])
                live.remove(uid)
        _, responses = generator.next()
        for response in responses:
            index = uids[response.uid]
            emissions.append(Emission(index, response.token, raw(response.logprobs)))
            texts.texts[index].append(response.token)
            if response.finish_reason is not None:
                live.remove(response.uid)
                texts.leave(index, response.all_tokens, response.prompt_cache)
        tick += 1
    generator.close()
    return emissions, texts.cached


def run(model, case, kv=None):
    """`kv`: what optiq() yielded, inside of it."""
    logged = Logged(model)
    serial = case["mode"] == "serial"
    emissions, cached = run_serial(logged, case, kv or {}) if serial else run_batch(logged, case)
    return Run(emissions, logged.forwards, cached)


def run_all(model, script, variant, folder: Path):
    if variant.kv_quant == "off":
        return [run(model, case) for case in script]
    with optiq(variant.kv_quant, folder, variant.kv_group) as kv:
        return [run(model, case, kv) for case in script]
