# SPDX-License-Identifier: Apache-2.0
"""Role: the rendezvous, on a free port of the loopback interface."""

from __future__ import annotations

from aiohixl.demo.child import Child, run_role

__all__ = ["main"]


async def main(child: Child) -> None:
    from aiohixl.rendezvous import serve

    def on_ready(url: str) -> None:
        child.say(f"listening on {url}")
        child.send("ready", url=url)

    await serve("127.0.0.1", 0, child.config["token"], on_ready, stop=child.stop)


if __name__ == "__main__":
    run_role("rendezvous", main)
