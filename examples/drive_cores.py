"""Level 1: both cores in a loop of your own. No thread, no socket, no sleep: a core takes
events and the time, and returns effects; network, memory, engine and clock are yours."""

from __future__ import annotations

import pdcore
from pdcore import Incarnation, PeerRef, RoomKey, SamplingParams, effects, events


class Side:
    """One rank: a core, an engine, and the memory that holds its KV blocks."""

    def __init__(self, name: str, make_core: type[pdcore.PrefillCore | pdcore.DecodeCore]) -> None:
        self.name, self.runner, self.num_tokens = name, pdcore.SimulatedRunner(), 0
        setup = pdcore.CoreSetup(
            me=PeerRef(name, 0, Incarnation(name.encode().ljust(16)), f"tcp://{name}:1"),
            limits=pdcore.CoreLimits(),
            spec=self.runner.kv_cache_spec,
            placement=self.runner.initialize_cache(64, self.allocate),
            max_model_len=self.runner.max_model_len,
            eos_token_ids=self.runner.eos_token_ids,
            fingerprint=self.runner.fingerprint,
            transport="slices",
        )
        self.core = make_core(setup, pdcore.KVBlocks(setup.spec, 64, setup.max_model_len))

    def allocate(self, size_bytes: int) -> tuple[int, memoryview]:
        self.memory = memoryview(bytearray(size_bytes))
        return 1, self.memory

    def turn(self, peer: Side, now: float) -> None:
        """One iteration: timers, at most one engine step, one tick, and what follows."""
        self.core.handle_timeout(now)
        if batch := self.core.schedule(now):
            output = self.runner.execute_model(batch)
            self.core.handle_event(events.StepCompleted(batch.batch_id, output), now)
        self.core.tick(now)
        while found := self.core.poll_effects():
            for effect in found:
                self.carry_out(effect, peer, now)

    def carry_out(self, effect: effects.Effect, peer: Side, now: float) -> None:
        match effect:
            case effects.SendMessage(to, message):
                came = events.MessageReceived(self.core.setup.me, to.incarnation, message)
                peer.core.handle_event(came, now)
            case effects.PostTransfer(handle=handle, batches=batches):
                for start, to_start, size in (p for batch in batches for p in batch.pieces()):
                    peer.memory[to_start : to_start + size] = self.memory[start : start + size]
                self.core.handle_event(events.HandleEnded(handle, quiesced=True), now)
            case effects.FetchTopology(bootstrap):
                route = pdcore.route_of([peer.core.setup])
                self.core.handle_event(events.TopologyFetched(bootstrap, route), now)
            case effects.ReduceVotes(sequence, _, votes):
                self.core.handle_event(events.VotesReduced(sequence, votes), now)
            case effects.ReportTokens(_, token_ids):
                self.num_tokens += sum(map(len, token_ids))
            case effects.ReportFinished(key, reason):
                print(f"room {key.room}: {self.name} ended it with {reason.value}")


def main() -> None:
    prefill, decode = Side("prefill", pdcore.PrefillCore), Side("decode", pdcore.DecodeCore)
    for room, params in ((1, SamplingParams(max_tokens=20)), (2, SamplingParams())):
        now, key = float(room), RoomKey(room, attempt=1)
        request = pdcore.GenerateRequest(key, "id", (5, 6, 7), params, 1e9, 60.0, "prefill")
        for core in (prefill.core, decode.core):
            core.submit(request, now)
        while prefill.core.live_keys() or decode.core.live_keys():
            if decode.num_tokens == 50:  # abort by room; only the second gets this far
                decode.core.abort(key, pdcore.errors.failure("cancelled", "enough"), now)
            now += 0.001
            prefill.turn(decode, now)
            decode.turn(prefill, now)
        print(f"room {room}: {decode.num_tokens} tokens so far, {decode.core.blocks}")


if __name__ == "__main__":
    main()
