"""``pdcore up``: a whole cluster on this machine, in the foreground."""

from __future__ import annotations

import asyncio
from pathlib import Path

from pdcore.cli.options import EngineFlags


def up(
    *,
    port: int = 8000,
    host: str = "127.0.0.1",
    prefill: int = 1,
    decode: int = 1,
    prefill_tp: int = 1,
    decode_tp: int = 1,
    prefill_dp: int = 1,
    decode_dp: int = 1,
    yaml_file_path: Path | None = None,
    engine: EngineFlags | None = None,
) -> int:
    """Run a router, prefill and decode instances on this machine until Ctrl-C.

    Ctrl-C lets running requests finish; a second one ends everything at once. No process is
    left behind, however this one ends.

    Examples:

    - `pdcore up`
    - `pdcore up --port 9000 --prefill 2 --decode 2`
    - `pdcore up --prefill-tp 3`: each prefill instance in three tensor parallel processes
    - `pdcore up --model ./my-llama`
    - `pdcore up --simulated`: no model, no torch; prompts are token ids

    Then:

        curl localhost:8000/v1/completions \\
          -H 'content-type: application/json' \\
          -d '{"prompt": "The sea is", "max_tokens": 16}'

    Parameters
    ----------
    port
        The router's port; 0 takes a free one.
    host
        What the router binds; 0.0.0.0 for all interfaces. Instances stay on loopback.
    prefill
        Number of prefill instances.
    decode
        Number of decode instances.
    prefill_tp
        Tensor parallel ranks of each prefill instance, a process each. They must divide what
        the model splits: 1 or 3 for the one that is built in.
    decode_tp
        The same of each decode instance; the two may differ.
    prefill_dp
        Data parallel groups of each prefill instance, of prefill_tp ranks each.
    decode_dp
        The same of each decode instance.
    yaml_file_path
        Settings for both roles; flags win.
    """
    from pdcore.cli.options import instance_config
    from pdcore.cli.session import PipeConsole, run_cluster, until_told
    from pdcore.cli.workplace import workplace
    from pdcore.config_loader import load_environment
    from pdcore.server.cluster import Cluster, ClusterConfig

    env = load_environment()
    config = instance_config(engine or EngineFlags(), env, yaml_file_path)
    cluster_config = ClusterConfig(
        config, host, port, prefill, decode, prefill_tp, decode_tp, prefill_dp, decode_dp
    )
    place = workplace(env)
    console = PipeConsole()

    async def serve(cluster: Cluster, stopping: asyncio.Event) -> int:
        console.print(f"\nready: {cluster.url}  (Ctrl-C drains)", markup=False, highlight=False)
        for member in cluster.members:
            where = member.bound.http if member.bound is not None else ""
            console.print(f"  {member.name:<10} {member.status:<6} http://{where}", markup=False)
        return await until_told(cluster, stopping)

    return asyncio.run(run_cluster(cluster_config, place, console, serve))
