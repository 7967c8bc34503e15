"""Level 3: pdcore's apps mounted in servers of your own, next to your own routes: a prefill
and a decode host with the engine of own_runner.py in a thread, and a front door."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from http.client import HTTPResponse

from own_runner import make_worker
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Mount, Route

import pdcore
from pdcore import EmbeddedInstance, LocalPort, Role, SystemClock, WorkerOptions


def mounted(path: str, app: Starlette, *own: Route) -> Starlette:
    return Starlette(routes=[*own, Mount(path, app)], lifespan=pdcore.run_lifespans(app))


async def main() -> None:
    listeners = [pdcore.bind("127.0.0.1", 0) for _ in range(3)]
    prefill_at, decode_at, front_at = (f"127.0.0.1:{pdcore.port_of(one)}" for one in listeners)
    text = pdcore.TextModel("parrot", pdcore.IdTokenizer(), pdcore.IdDetokenizer)
    options = WorkerOptions(Role.PREFILL, prefill_at, num_blocks=600)
    prefill = EmbeddedInstance(make_worker(LocalPort(), options), text)
    route = pdcore.RouteFetcher(pdcore.BootstrapClient(SystemClock()))
    options = WorkerOptions(Role.DECODE, decode_at, num_blocks=600, fetch_route=route)
    decode = EmbeddedInstance(make_worker(LocalPort(), options), text)
    router = pdcore.create_router_app([prefill_at], [decode_at], [0], clock=SystemClock())

    async def abort(request: Request) -> JSONResponse:
        room = int(request.path_params["room"])
        return JSONResponse([leg.abort(room, "told to stop") for leg in (prefill, decode)])

    own = Route("/abort/{room}", abort, methods=["POST"])
    apps = mounted("/", prefill.app), mounted("/", decode.app), mounted("/ai", router, own)
    servers = [
        pdcore.AppServer(app, listener) for app, listener in zip(apps, listeners, strict=True)
    ]
    try:
        for server in servers:
            await server.start()
        await asyncio.to_thread(ask, f"http://{front_at}")
    finally:
        await asyncio.gather(*(server.stop() for server in servers))


def post(url: str, **body: object) -> HTTPResponse:
    answer: HTTPResponse = urllib.request.urlopen(url, json.dumps(body).encode(), timeout=60)
    return answer


def ask(front: str) -> None:
    """Two requests as a client makes them; the second is aborted by its room."""
    prompt = list(b"one potato, two potato, three potato, four; one potato, ")
    with post(f"{front}/ai/v1/completions", prompt=prompt, max_tokens=60) as answer:
        ids = json.load(answer)["choices"][0]["text"].split()
        print(bytes(map(int, ids)).decode())
    long = {"max_tokens": 6000, "stream": True, "bootstrap_room": 7}
    with post(f"{front}/ai/v1/completions", prompt=prompt, **long) as answer:
        print(answer.readline().decode()[:60], "...")
        with post(f"{front}/abort/7") as aborted:
            print("aborted (prefill, decode):", aborted.read().decode())
        print(answer.read().decode().split("data: ")[-1].strip())


if __name__ == "__main__":
    asyncio.run(main())
