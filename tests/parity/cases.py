"""What is run on every model: who asks for what, and when. Both sides read the same scripts."""

import random

from families import VARIANTS, VOCAB


def prompt(length, seed):
    return [random.Random(seed * 1000 + length).randrange(VOCAB - 1) for _ in range(length)]


def request(length, seed, max_tokens=40, arrive=0, cancel=None):
    """`arrive`, `cancel`: the tick before which the request comes or goes."""
    return dict(prompt=prompt(length, seed), max_tokens=max_tokens, arrive=arrive, cancel=cancel)


def after(follows, length, seed, **more):
    """Goes on where another request's answer ended."""
    return request(length, seed, **more) | dict(follows=follows)


def sharing(common, length, seed, **more):
    """`length` tokens behind the first `common` ones of a text that all such requests share."""
    return request(length, seed, **more) | dict(prompt=prompt(300, 7)[:common] + prompt(length, seed))


def serial(name, requests, prefill_step=2048):
    return dict(name=name, mode="serial", prefill_step=prefill_step, requests=requests)


def batch(name, requests, prefill_step=2048, prefill_batch=8, completion_batch=32, end_ids=()):
    return dict(name=name, mode="batch", prefill_step=prefill_step, prefill_batch=prefill_batch,
                completion_batch=completion_batch, end_ids=list(end_ids), requests=requests)


CASES = [
    serial("B=1", [request(7, 1)]),
    serial("B=1, one-token prompt", [request(1, 2)]),
    serial("B=1, prompt in chunks", [request(29, 3)], prefill_step=8),
    serial("B=1, past 256 tokens", [request(250, 4)], prefill_step=64),
    batch("batch of 1", [request(9, 5)]),
    batch("B=2", [request(5, 6), request(12, 7)]),
    batch("B=3", [request(3, 8), request(17, 9), request(8, 10)]),
    batch("B=3, equal lengths", [request(6, 11), request(6, 12), request(6, 13)]),
    batch("B=8", [request(n, 20 + n) for n in (4, 19, 1, 11, 2, 33, 7, 26)]),
    batch("B=3, prompts in chunks", [request(40, 30), request(5, 31), request(21, 32)], prefill_step=8),
    batch("B=2, 200 tokens", [request(3, 94, max_tokens=200), request(70, 95, max_tokens=200)]),
    batch("B=2, one-token prompts", [request(1, 33), request(1, 34)]),
    batch("B=2, past 256 tokens", [request(244, 35), request(251, 36)], prefill_step=128),
    # {A, B} -> C joins -> A leaves -> {B, C} -> D joins with a long prompt -> B leaves -> E, F join -> ... -> empty
    batch("joins and leaves", [
        request(6, 40, max_tokens=12),
        request(13, 41, max_tokens=44),
        request(4, 42, max_tokens=60, arrive=5),
        request(30, 43, max_tokens=40, arrive=20),
        request(1, 44, max_tokens=41, arrive=50),
        request(18, 45, max_tokens=40, arrive=50),
    ], prefill_step=8),
    batch("cancels", [
        request(8, 50, max_tokens=60),
        request(15, 51, max_tokens=60, cancel=9),
        request(40, 52, max_tokens=40, arrive=4, cancel=7),  # while its prompt is being processed
        request(11, 53, max_tokens=45, arrive=10),
        request(5, 54, max_tokens=40, arrive=12, cancel=12),  # before it began
    ], prefill_step=8),
    batch("queue longer than the batch", [
        request(n, 60 + i, max_tokens=40 + i % 3) for i, n in enumerate((3, 14, 9, 1, 22, 6, 17, 5))
    ], prefill_step=8, prefill_batch=2, completion_batch=3),
    # Which of these tokens a random model says, and when, is its own affair; whoever says one leaves.
    batch("ends of generation", [
        request(5 + 2 * i, 80 + i, max_tokens=60, arrive=3 * i) for i in range(6)
    ], end_ids=range(0, VOCAB, 16)),
    batch("empty, then again", [
        request(5, 70, max_tokens=5), request(3, 71, max_tokens=7),
        request(9, 72, max_tokens=40, arrive=30), request(2, 73, max_tokens=40, arrive=31),
    ]),
]

# With a prompt cache: what is found, what of it can be used, and the bits of what goes on from there. Nobody arrives in
# the very tick in which somebody ends, when mlx-lm looks before that one's KV is kept, and galley after.
REUSING = [case | dict(reuse=True) for case in [
    serial("reuse: turns of a chat, B=1", [
        request(20, 200, max_tokens=15), after(0, 9, 201, max_tokens=12), after(1, 1, 202, max_tokens=9),
        request(20, 200, max_tokens=6), after(2, 30, 203, max_tokens=8),
    ], prefill_step=8),
    serial("reuse: common beginnings, B=1", [
        sharing(6, 2, 210, max_tokens=6), sharing(6, 3, 211, max_tokens=5), sharing(4, 0, 212, max_tokens=5),
        sharing(6, 20, 213, max_tokens=30), sharing(6, 2, 214, max_tokens=8), request(9, 215, max_tokens=5),
    ]),
    serial("reuse: past 256 tokens, B=1", [
        sharing(240, 4, 220, max_tokens=20), sharing(240, 40, 221, max_tokens=5), after(0, 10, 222, max_tokens=5),
    ], prefill_step=64),
    batch("reuse: turns of chats in a batch", [
        request(6, 230, max_tokens=10),
        request(19, 231, max_tokens=12),
        after(0, 5, 232, max_tokens=30, arrive=25),
        after(1, 9, 233, max_tokens=9, arrive=25),
        request(11, 234, max_tokens=20, arrive=25),       # nothing to reuse, beside two that have
        after(3, 1, 235, max_tokens=12, arrive=45),       # joins a running batch
        after(2, 21, 236, max_tokens=10, arrive=80),
    ], prefill_step=8),
    batch("reuse: common beginnings in a batch", [
        sharing(6, 2, 240, max_tokens=6),
        sharing(6, 8, 241, max_tokens=25, arrive=20),
        sharing(5, 4, 242, max_tokens=12, arrive=22),
        sharing(6, 18, 243, max_tokens=14, arrive=60),
        request(5, 244, max_tokens=9, arrive=60),
        sharing(4, 0, 245, max_tokens=9, arrive=90),
    ], prefill_step=8),
]]
CASES += REUSING

# For models with sliding windows (of 16 tokens or fewer): prompts shorter and longer, rings that turn at least twice,
# and rows that come and go before and after.
WINDOWED = [
    serial("B=1, 200 tokens, prompt in chunks", [request(50, 90, max_tokens=200)], prefill_step=12),
    serial("B=1, prompt as long as the window", [request(17, 91)]),
    serial("B=1, prompt longer by one", [request(18, 92)]),
    batch("B=8 around the window", [request(n, 100 + n, max_tokens=60) for n in (15, 16, 17, 18, 31, 32, 33, 64)]),
    batch("long prompts join a running batch", [
        request(5, 110, max_tokens=90),
        request(20, 111, max_tokens=70, arrive=2),
        request(90, 112, max_tokens=60, arrive=6),   # before the first row's ring turns
        request(2, 113, max_tokens=50, arrive=25),
        request(75, 114, max_tokens=45, arrive=40),  # and after it has turned twice
        request(40, 115, max_tokens=40, arrive=40),
    ]),
    batch("long prompts in chunks join a running batch", [
        request(4, 120, max_tokens=80),
        request(61, 121, max_tokens=60, arrive=1),
        request(33, 122, max_tokens=50, arrive=3),
        request(1, 123, max_tokens=45, arrive=12),
        request(47, 124, max_tokens=40, arrive=30),
    ], prefill_step=8),
    batch("leaves after the ring has turned", [
        request(10, 130, max_tokens=24),
        request(37, 131, max_tokens=80, cancel=70),
        request(2, 132, max_tokens=80),
        request(18, 133, max_tokens=40),
        request(25, 134, max_tokens=60, arrive=50),
    ]),
]


# What variants run that don't run everything.
REUSE = {"reuse: turns of a chat, B=1", "reuse: common beginnings, B=1", "reuse: turns of chats in a batch",
         "reuse: common beginnings in a batch"}
BRIEF = {"B=1, prompt in chunks", "B=2", "B=3", "B=8", "joins and leaves", "B=8 around the window",
         "long prompts in chunks join a running batch"}
# The few that tell most, for families whose caches and schedule others have been through already.
LEAN = {"B=1, prompt longer by one", "B=3", "B=8 around the window", "joins and leaves",
        "long prompts in chunks join a running batch"}
# And one variant of each family.
ENDURING = {"B=1, 200 tokens, prompt in chunks", "B=2, 200 tokens"}


# With quantized KV.
QUANTIZED = {"B=1", "B=1, prompt in chunks", "B=3", "joins and leaves"}
QUANTIZED_LONG = {"B=1, past 256 tokens", "B=2, past 256 tokens"}
QUANTIZED_WINDOWED = {"B=1, prompt in chunks", "B=1, 200 tokens, prompt in chunks", "B=1, prompt longer by one",
                      "B=8 around the window", "long prompts in chunks join a running batch"}


def of(config, variant):
    """The cases that this variant runs; `config` says how its text model is made."""
    windowed = bool(config.get("sliding_window"))
    chosen = CASES + (WINDOWED if windowed else [])
    if variant.kv_quant != "off":
        names = QUANTIZED_WINDOWED if windowed else QUANTIZED if variant.brief else QUANTIZED | QUANTIZED_LONG
    else:
        names = LEAN if variant.lean else BRIEF if variant.brief else {case["name"] for case in chosen}
        if variant is next(v for v in VARIANTS if v.family == variant.family):
            names = names | ENDURING
    if variant.reuse:
        names = names | REUSE
    return [case for case in chosen if case["name"] in names]
