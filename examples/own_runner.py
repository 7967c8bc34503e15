"""Level 2: your own engine behind pdcore.Worker; prefill and decode in a thread each."""

from __future__ import annotations

import os
import queue
import time

import pdcore
from pdcore import GenerateRequest, LocalPort, Role, RoomKey, SamplingParams, WorkerOptions


class ParrotRunner:
    """The KV of a token is the token, a byte; it goes on as the text went on before."""

    caps, fingerprint = pdcore.RunnerCaps(), "parrot"
    max_model_len, vocab_size, eos_token_ids = 8192, 256, frozenset[int]()
    kv_cache_spec = pdcore.KVCacheSpec((pdcore.KVCacheEntry("text", "full", "uint8", 16, 1, 1, 1),))
    kv: memoryview | None = None

    def initialize_cache(self, num_blocks: int, allocate: pdcore.Allocate) -> pdcore.KVPlacement:
        region, self.kv = allocate(num_blocks * 16)
        self.limits = pdcore.PagedLimits(16, 16, num_blocks, self.max_model_len, self.vocab_size)
        return pdcore.side_by_side(self.kv_cache_spec, num_blocks, region)

    def execute_model(self, batch: pdcore.Batch) -> pdcore.StepOutput:
        if self.kv is None:
            raise pdcore.errors.EngineError("the runner has no KV cache")
        slots, said = pdcore.batch_slots(batch, self.limits), []  # refuses what it cannot run
        for i, start, end in batch.spans():
            for at, token in zip(slots[i][start - end :], batch.input_ids[start:end], strict=True):
                self.kv[at] = token
            said.append(parrot(bytes(self.kv[at] for at in slots[i])) if batch.sample[i] else None)
        return pdcore.StepOutput(said, [token and (0.0,) for token in said])

    def warm_up(self) -> None: ...

    def shutdown(self) -> None:
        self.kv = None


def parrot(text: bytes) -> tuple[int]:
    """What followed when the last bytes of the text, 16 at most, occurred before."""
    ends = (text[-size:] for size in range(min(len(text) - 1, 16), 0, -1))
    places = (at + len(end) for end in ends if (at := text.rfind(end, 0, -1)) >= 0)
    return (text[next(places, 0)],)


def make_worker(port: LocalPort, options: WorkerOptions) -> pdcore.Worker:
    name = "loopback" if pdcore.available_transports()["shm"] else "shm"
    transport = pdcore.create_transport(name, pdcore.Incarnation(os.urandom(16)))
    return pdcore.build_worker(ParrotRunner(), transport, pdcore.ZmqChannel(), port, options)


def main() -> None:
    news: queue.Queue[pdcore.WorkerMessage] = queue.Queue()
    prefill_port, decode_port = LocalPort(lambda message: None), LocalPort(news.put)
    prefill = make_worker(prefill_port, WorkerOptions(Role.PREFILL, "prefill", 600))
    route = pdcore.local_route([prefill.core.setup])
    decode = make_worker(decode_port, WorkerOptions(Role.DECODE, "decode", 600, fetch_route=route))
    prompt = tuple(b"one potato, two potato, three potato, four; one potato, ")
    with pdcore.WorkerThread(prefill), pdcore.WorkerThread(decode):
        for room, max_tokens in ((1, 60), (2, 6000)):
            key, params = RoomKey(room, attempt=1), SamplingParams(max_tokens=max_tokens)
            request = GenerateRequest(key, "id", prompt, params, time.time() + 60, 60.0, "here")
            for port in (prefill_port, decode_port):
                port.submit(request)
            while not isinstance(message := news.get(timeout=60), pdcore.Finished):
                if isinstance(message, pdcore.Tokens):
                    print(bytes(message.token_ids[0]).decode(), end="", flush=True)
                    if room == 2:  # abort by room: asking more than once does no harm
                        decode_port.abort(key, "heard enough")
            print(f" [{message.finish_reason}]")


if __name__ == "__main__":
    main()
