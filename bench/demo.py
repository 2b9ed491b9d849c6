"""The demonstration model: tokens per second at 1, 4 and 8 clients, the time of a startup, and the worker's memory.

    .venv/bin/python bench/demo.py [--other /path/to/another/tree] [--rounds 5] [--starts 3]

Two source trees are compared in turns: each is started by its own entrypoint.sh with default settings, and is stopped (SIGSTOP)
while the other one is measured. A startup is the time from running entrypoint.sh to `Connected` in its log: the first with an
empty home folder (nothing converted, nothing compiled), the later ones with what the first has left there. A completion is 64
greedy tokens for a short question, 8 completions for each client. Both trees run on the Python that runs this file.

Owns this measurement. The turns are peers.py's.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

from launch import HERE, Server, clean_environment, free_port, rss_mb
from load import Target
from peers import Peer, Turns, spread

CLIENTS, TOKENS = (1, 4, 8), 64
QUESTION = "What is Deep Learning?"


def start(tree: Path, scratch: Path) -> Server:
    """A server of that tree. Its home folder, with every cache, is in `scratch`."""
    port, home = free_port(), scratch / "home"
    home.mkdir(parents=True, exist_ok=True)
    environment = clean_environment(scratch, port, HOME=str(home), NUMBA_CACHE_DIR=str(home / "numba"))
    return Server([tree / "entrypoint.sh", "serve"], port, scratch / "log", environment)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--other", type=Path, help="another source tree to compare with")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--starts", type=int, default=3, help="how many later startups")
    args = parser.parse_args()
    trees = {"this tree": HERE} | ({"the other": args.other.resolve()} if args.other else {})
    turns = Turns(lambda target: target.request(QUESTION, TOKENS), TOKENS, CLIENTS, [8 * clients for clients in CLIENTS])
    servers: list[Server] = []
    with tempfile.TemporaryDirectory(prefix="textgen-bench-") as name:
        folders = {tree: Path(name) / str(number) for number, tree in enumerate(trees)}
        try:
            starts: dict[str, list[float]] = {tree: [] for tree in trees}
            for number in range(1 + args.starts):
                for tree, folder in trees.items():
                    servers.append(server := start(folder, folders[tree]))
                    starts[tree].append(server.wait_ready().ready_s)
                    if number < args.starts:
                        servers.pop().end()
                    else:
                        turns.add(Peer(tree, server, Target(urlsplit(server.url), model="demo")))
            turns.run(args.rounds)
            turns.report()
            for (tree, (first, *later)), server in zip(starts.items(), servers):
                print(f"{tree}: first startup {first:.1f} s, later {spread(later or [first], 0, 2)} s; ", end="")
                print(f"worker {rss_mb(server.pids('worker.py')[0]):.0f} MB RSS")
        except RuntimeError as error:
            sys.exit(f"error: {error}")
        finally:
            for server in servers:
                server.end()


if __name__ == "__main__":
    main()
